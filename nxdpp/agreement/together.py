"""Objects and errors exchanged between all ranks, so that all ranks continue or all ranks raise.

An error on one rank is raised on every rank. Otherwise the other ranks would wait for it in their next collective.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.connection_errors import told

T = TypeVar("T")


class Failure(NamedTuple):
    """An error of one rank for the others: the kind that they raise, and its class and message."""

    kind: type[Exception]
    text: str


def from_all_ranks(value: T) -> list[T]:
    """Gather the ``value`` of every rank, in the order of global ranks; collective over all ranks.

    The values pass through the world's store, so that no group over all ranks is needed. They should be small.
    """
    with board.call("from_all_ranks"):
        return parallel_state.get_exchange().gather(value)


def together(
    act: Callable[[], T],
    consequence: str = "",
    *,
    gather: Callable[[Any], Sequence[Any]] = from_all_ranks,
    kinds: Sequence[type[Exception]] = (ValueError,),
) -> T:
    """Return the result of ``act`` on this rank, or raise on all ranks; collective over all ranks.

    A rank on which ``act`` fails raises its own error. The other ranks raise the first of ``kinds`` that fits it, or
    ``RuntimeError``. Their message has ``consequence`` and the first failed rank with its message.

    Args:
        act: work of this rank.
        consequence: a sentence on the state after a failure, such as "nothing was written".
        gather: returns the value of each rank.
        kinds: classes of errors that the other ranks raise too.
    """
    result, own = _tried(act)
    _raise_first(own, gather((_failure(own, kinds), None)), consequence)
    return cast(T, result)


def all_together(
    act: Callable[[], T], *, gather: Callable[[Any], Sequence[Any]], kinds: Sequence[type[Exception]]
) -> list[T]:
    """Return the results of ``act`` on all ranks, or raise as ``together`` does, in one exchange."""
    result, own = _tried(act)
    everyones = gather((_failure(own, kinds), result))
    _raise_first(own, everyones, "")
    return [cast(T, each) for _, each in everyones]


def from_first_rank(make: Callable[[], T]) -> T:
    """Return the result of ``make`` on global rank 0 to every rank; collective over all ranks.

    An error of ``make`` is raised on all ranks, see ``together``. Raises ``RuntimeError`` in the debug mode.
    """
    parallel_state.refuse_in_debug("a result of rank 0 for all ranks")
    with board.call("from_first_rank"):
        made = from_all_ranks(together(lambda: make() if dist.get_rank() == 0 else None))
    return cast(T, made[0])


def _tried(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _failure(own: Exception | None, kinds: Sequence[type[Exception]]) -> Failure | None:
    if own is None:
        return None
    return Failure(
        next((kind for kind in kinds if isinstance(own, kind)), RuntimeError), f"{type(own).__name__}: {own}"
    )


def _raise_first(own: Exception | None, everyones: Sequence[tuple[Failure | None, Any]], consequence: str) -> None:
    """Raise the error of this rank, or the error of the first rank that failed."""
    if own is not None:
        raise own
    for rank, (failure, _) in enumerate(everyones):
        if failure is not None:
            prefix = f"{consequence}: " if consequence else ""
            raise told(failure.kind(f"{prefix}on rank {rank}, {failure.text}"))
