"""Comparison of a value over ranks: all of them get the same difference, for one message, or none does.

::

    rank 0   digest ─┐ equal on all ranks ─▶ None
    rank 1   digest ─┴ different ─▶ the values of both ─▶ Unequal, the same on every rank
"""

from collections.abc import Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.same_values import sample
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange

T = TypeVar("T")


class Unequal(NamedTuple, Generic[T]):
    """Two ranks with different values: the first rank, and the first one that differs from it.

    Attributes:
        places: of the two among the ranks that were compared.
        ranks: their global ranks.
        values, notes: as these ranks gave them.
    """

    places: tuple[int, int]
    ranks: tuple[int, int]
    values: tuple[T, T]
    notes: tuple[Any, Any]

    def names(self, kind: str) -> tuple[str, str]:
        """Return both ranks for a message: ``pipeline rank 1 (rank 5)``."""
        first, other = (f"{kind} {place} (rank {rank})" for place, rank in zip(self.places, self.ranks, strict=True))
        return first, other


def unequal(value: T, *groups: dist.ProcessGroup, note: Any = None, mates: Hashable | None = None) -> Unequal[T] | None:
    """Compare ``value`` over the ranks of ``groups``; collective over them.

    Args:
        value: texts, numbers, and tuples, lists and dicts of them. Ranks compare a digest of its ``repr``.
        groups: for CPU tensors. The second one joins the ranks of the first, and so on. Without any all ranks compare.
        note: a value that is not compared, for the message.
        mates: equal on ranks whose values are compared with each other, by default on all.
    """
    exchange = Exchange(*groups)
    digests = exchange.gather((mates, digest(repr(value).encode())))
    firsts = {of: place for place, (of, _) in reversed([*enumerate(digests)])}
    pairs = [(firsts[of], place) for place, (of, own) in enumerate(digests) if own != digests[firsts[of]][1]]
    if not pairs:
        return None
    everyones = exchange.gather((dist.get_rank(), value, note))
    (one, other), (there, here) = pairs[0], (everyones[place] for place in pairs[0])
    return Unequal((one, other), (there[0], here[0]), (there[1], here[1]), (there[2], here[2]))


def verify_same_inputs(leaves: Iterable[Any], relation: str, remedy: str) -> None:
    """Raise ``RuntimeError`` on all ranks of the tensor group unless they got the same inputs; collective over it.

    The message has the ``relation`` of two ranks, such as "are in one unit", and the ``remedy``.
    """
    found = unequal([leaf_text(leaf) for leaf in leaves], parallel_state.get_tensor_control_group())
    if found is not None:
        first, other = found.ranks
        raise RuntimeError(f"ranks {first} and {other} {relation} and got other inputs: {remedy}")


def leaf_text(leaf: Any) -> str:
    """Return a text by which ranks compare an input: shape, dtype and a hash of a tensor, or a plain value."""
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {sample(leaf, leaf.numel()).hex()}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
