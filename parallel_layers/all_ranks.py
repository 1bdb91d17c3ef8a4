"""Objects and errors exchanged between all ranks, so that all ranks continue or all ranks raise.

An error on one rank is raised on every rank. Otherwise the other ranks would wait for it in their next collective.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.faults.board import board

T = TypeVar("T")


def from_all_ranks(value: T) -> list[T]:
    """Gather the pickled ``value`` of every rank, in the order of global ranks; collective over all ranks.

    The values pass through the world's store, so that no group over all ranks is needed. They should be small.
    """
    with board.call("from_all_ranks"):
        return parallel_state.get_exchange().gather(value)


def together(act: Callable[[], T], consequence: str = "") -> T:
    """Return the result of ``act`` on this rank, or raise on all ranks; collective over all ranks.

    A rank on which ``act`` fails raises its own error. The other ranks raise ``ValueError`` for a ``ValueError`` and
    ``RuntimeError`` for any other error. Their message has ``consequence`` and the first failed rank with its message.
    """
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:
        own = error
    report = None if own is None else (isinstance(own, ValueError), f"{type(own).__name__}: {own}")
    failures = [(rank, failure) for rank, failure in enumerate(from_all_ranks(report)) if failure is not None]
    if own is not None:
        raise own
    if failures:
        rank, (is_value_error, message) = failures[0]
        prefix = f"{consequence}: " if consequence else ""
        raise (ValueError if is_value_error else RuntimeError)(f"{prefix}on rank {rank}, {message}")
    return result


def from_first_rank(make: Callable[[], T]) -> T:
    """Return the pickled result of ``make`` on global rank 0 to every rank; collective over all ranks.

    An error of ``make`` is raised on all ranks, see ``together``. Raises ``RuntimeError`` in the debug mode.
    """
    parallel_state.refuse_in_debug("a result of rank 0 for all ranks")
    with board.call("from_first_rank"):
        made = from_all_ranks(together(lambda: make() if dist.get_rank() == 0 else None))
    return cast(T, made[0])
