"""The part of a sequence that each of several ranks has: one piece from its head and one from its tail.

Ten tokens over two ranks, four pieces::

    tokens   0 1 2 │ 3 4 5 │ 6 7 │ 8 9
    rank     0       1       1     0

So under a causal mask, where late tokens see more than early ones, both have as much work. A length that does not
divide makes pieces that differ by one token. After the balanced cut of Brandon et al., "Striped Attention" (arXiv
2311.09431), and of Megatron-LM.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import has_values

# Lengths may change in each step.
_MOST_KEPT = 64


@lru_cache(_MOST_KEPT)
def places_of(length: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return for each of ``ranks`` the tokens that it has of a sequence of ``length``."""
    pieces = 2 * ranks
    least, longer = divmod(length, pieces)
    begins = [each * least + min(each, longer) for each in range(pieces + 1)]
    tokens = [range(begin, end) for begin, end in pairwise(begins)]
    return tuple((*tokens[rank], *tokens[-1 - rank]) for rank in range(ranks))


def own_places(length: int, ranks: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    """Return the tokens of ``rank``, int64 ``(tokens,)``, on the device of ``like``, or fake as it is."""
    return _index(like, lambda: places_of(length, ranks)[rank], (length, ranks, rank))


def order_of(length: int, ranks: int, like: torch.Tensor) -> torch.Tensor:
    """Return where each token of a sequence is among the parts of all ranks, int64 ``(length,)``, as ``like``."""

    def order() -> list[int]:
        joined = [token for part in places_of(length, ranks) for token in part]
        return sorted(range(length), key=joined.__getitem__)

    return _index(like, order, (length, ranks))


def _index(like: torch.Tensor, numbers: Callable[[], Sequence[int]], key: tuple[int, ...]) -> torch.Tensor:
    """Return ``numbers`` as a tensor, which is kept: a copy to a device waits for it."""
    kept = _kept.get((like.device, *key)) if has_values(like) else None
    if kept is None:
        kept = torch.tensor(numbers(), dtype=torch.int64, device=like.device)
        if has_values(kept):
            _kept[like.device, *key] = kept
            if len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)))
    return kept


_kept: dict[tuple[Any, ...], torch.Tensor] = {}


def cut_sequence(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's tokens of ``whole``, which lie along ``dim``, as one node of a trace."""
    own: torch.Tensor = _Cut.apply(whole, dim)  # type: ignore[no-untyped-call]
    return own


class _Cut(torch.autograd.Function):
    """Takes this rank's tokens; the gradients of the others are zeros here, and come from their ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int) -> torch.Tensor:
        ranks, rank = parallel_state.get_context_model_parallel_size(), parallel_state.get_context_model_parallel_rank()
        ctx.shape, ctx.dim = whole.shape, dim
        ctx.places = own_places(whole.shape[dim], ranks, rank, whole)
        return whole.index_select(dim, ctx.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient.new_zeros(ctx.shape).index_copy(ctx.dim, ctx.places, gradient), None
