"""Order of attention heads over tensor ranks in NeuronX Distributed's ``GQAQKVColumnParallelLinear``.

``multiplier`` ranks hold copies of each key-value head, and a block of query heads goes with each copy. With 8 query
heads, 2 key-value heads and a multiplier of 2 on 4 ranks::

    rank              0     1     2     3
    trn1   key-value  0     1     0     1          copies follow each other
           queries    0 1   4 5   2 3   6 7
    trn2   key-value  0     0     1     1          copies of a head are neighbours, as in nxdpp
           queries    0 1   2 3   4 5   6 7
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nxdpp.counted import counted

BACKENDS = ("trn1", "trn2")


@dataclass(frozen=True)
class HeadOrder:
    """Heads of a model in the order of NxD's ranks.

    Attributes:
        query_heads, kv_heads: numbers of heads of the model.
        ranks: number of tensor ranks.
        multiplier: copies of each key-value head.
        backend: ``"trn1"`` or ``"trn2"``.
        pads: add query heads of zeros, to a multiple of ``ranks``.

    Raises ``ValueError`` for numbers that do not divide.
    """

    query_heads: int
    kv_heads: int
    ranks: int
    multiplier: int
    backend: str
    pads: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        copies, padded = self.kv_heads * self.multiplier, self._padded
        if padded % copies or self.query_heads % self.kv_heads or self._group % (padded // copies):
            remedy = "" if self.pads or self.backend == "trn2" else ", or give --pad_attn_heads True"
            raise ValueError(
                f"{self.query_heads} query heads do not divide over {counted(self.kv_heads, 'key-value head')} with "
                f"--kv_size_multiplier {self.multiplier} on {counted(self.ranks, 'tensor rank')}. Choose numbers that "
                f"do{remedy}."
            )
        if padded % self.ranks or copies % self.ranks:
            raise ValueError(
                f"{padded} query heads and {copies} copies of key-value heads do not divide over {self.ranks} tensor "
                f"ranks. Choose a --kv_size_multiplier with which they do."
            )
        if self.pads and self.backend == "trn2":
            raise ValueError("--pad_attn_heads is for --hw_backend trn1: NxD's converter has no order of it for trn2.")

    @property
    def queries(self) -> list[int | None]:
        """The query head at each place; ``None`` for one of zeros."""
        if self.backend == "trn2":
            return list(range(self.query_heads))
        size = self._padded // (self.kv_heads * self.multiplier)
        return [
            head * self._group + place if place < self._group else None
            for copy in range(self.multiplier)
            for head in range(self.kv_heads)
            for place in range(copy * size, (copy + 1) * size)
        ]

    def key_values(self, backend: str) -> list[int]:
        """The key-value head at each place, as on ``backend``."""
        heads = range(self.kv_heads)
        if backend == "trn2":
            return [head for head in heads for _ in range(self.multiplier)]
        return [*heads] * self.multiplier

    @property
    def _padded(self) -> int:
        return math.ceil(self.query_heads / self.ranks) * self.ranks if self.pads else self.query_heads

    @property
    def _group(self) -> int:
        """Query heads of a key-value head."""
        return self.query_heads // self.kv_heads


def heads_of_rank(
    whole: torch.Tensor, order: Sequence[int | None], heads: int, dim: int, rank: int, ranks: int
) -> torch.Tensor:
    """Return the heads of ``rank`` of a tensor that has ``heads`` along ``dim``, in ``order``, as a new tensor."""
    by_head: torch.Tensor = whole.unflatten(dim, (heads, -1))
    size = len(order) // ranks
    chosen = order[rank * size : (rank + 1) * size]
    taken = by_head.index_select(dim, torch.tensor([head or 0 for head in chosen]))
    for place, head in enumerate(chosen):
        if head is None:
            taken.select(dim, place).zero_()
    return taken.flatten(dim, dim + 1)


def heads_of_model(parts: Sequence[torch.Tensor], order: Sequence[int | None], heads: int, dim: int) -> torch.Tensor:
    """Join ``parts`` of all ranks, which have heads in ``order`` along ``dim``, into a tensor of ``heads`` in turn."""
    by_place: torch.Tensor = torch.cat([*parts], dim).unflatten(dim, (len(order), -1))
    return by_place.index_select(dim, torch.tensor([order.index(head) for head in range(heads)])).flatten(dim, dim + 1)


def are_copies(parts: Sequence[torch.Tensor], order: Sequence[int], dim: int) -> bool:
    """Return whether all copies of each head in ``parts`` are equal, if their heads are in ``order``."""
    joined = torch.cat([*parts], dim).unflatten(dim, (len(order), -1))
    firsts = joined.index_select(dim, torch.tensor([order.index(head) for head in order]))
    return torch.equal(joined, firsts)
