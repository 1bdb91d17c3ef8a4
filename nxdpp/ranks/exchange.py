"""Values and errors that ranks tell each other, so that all of them continue or all of them raise.

An error on one rank is raised on every rank. Otherwise the other ranks would wait for it in their next collective.
There are two transports::

    Exchange()         all ranks            the world's store (store_exchange): no group over all ranks is needed
    Exchange(group)    the ranks of a group tensors in host memory over its backend (group_values)

A process that has no others exchanges with itself.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from nxdpp.ranks import current_state, launch, parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.connection_errors import told
from nxdpp.ranks.group_values import gather_values
from nxdpp.ranks.store_exchange import StoreExchange

T = TypeVar("T")


class Exchange:
    """Values and errors of several ranks. Each method is collective over them, in one thread of each.

    A rank that fails raises its own error. The others raise the first of ``kinds`` that fits it, or ``RuntimeError``,
    with ``consequence`` and the first failed rank with its message.

    Args:
        groups: for CPU tensors. The second one joins the ranks of the first, and so on. Without any all ranks take
            part, with values that are small together.
        consequence: a sentence on the state after a failure, such as "nothing was written".
        kinds: classes of errors that the other ranks raise too.
        thread: a name, used once and the same on all ranks, for exchanges outside of the main thread.

    Attributes:
        rank, ranks: this rank's place in the exchange, and their number.
        failures: the kinds of the errors of all ranks in the last ``together``; the same on each rank.

    Raises ``RuntimeError`` for several ranks before ``initialize_model_parallel``, even if only the launcher knows of
    them.
    """

    def __init__(
        self,
        *groups: dist.ProcessGroup,
        consequence: str = "",
        kinds: Sequence[type[Exception]] = (ValueError,),
        thread: str | None = None,
    ) -> None:
        self._groups, self._consequence, self._kinds = groups, consequence, kinds
        self._is_call = thread is None and not groups
        self._store: StoreExchange | None = None
        self.failures: list[type[Exception]] = []
        self.rank, self.ranks = 0, 1
        for group in groups:
            self.rank += self.ranks * dist.get_rank(group)
            self.ranks *= dist.get_world_size(group)
        if not groups and is_several():
            ours = parallel_state.get_exchange()
            self._store = ours if thread is None else ours.named(thread)
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of each rank, in the order of their places."""
        with board.call("an exchange of all ranks") if self._is_call else nullcontext():
            if self._store is not None:
                return self._store.gather(value)
            everyones = [value]
            for group in self._groups:
                everyones = [each for some in gather_values(everyones, group) for each in some]
            return everyones

    def together(self, act: Callable[[], T]) -> T:
        """Return the result of ``act`` on this rank, or raise on all ranks."""
        results: list[T] = []
        self.all_together(lambda: results.append(act()))
        return results[0]

    def all_together(self, act: Callable[[], T]) -> list[T]:
        """Return the results of ``act`` on all ranks, or raise as ``together`` does."""
        result: T | None = None
        own: Exception | None = None
        told_of: _Failure | None = None
        try:
            result = act()
        except Exception as error:
            own = error
            kind = next((kind for kind in self._kinds if isinstance(error, kind)), RuntimeError)
            told_of = _Failure(kind, f"{type(error).__name__}: {error}")
        everyones = self.gather((told_of, result))
        self.failures = [failure.kind for failure, _ in everyones if failure is not None]
        if own is not None:
            raise own
        for rank, (failure, _) in enumerate(everyones):
            if failure is not None:
                prefix = f"{self._consequence}: " if self._consequence else ""
                raise told(failure.kind(f"{prefix}on rank {rank}, {failure.text}"))
        return [cast(T, each) for _, each in everyones]

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which only the first rank calls; its error is raised on all ranks."""
        return cast(T, self.all_together(lambda: make() if self.rank == 0 else None)[0])

    def through_first(self, value: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return this rank's result of ``answer``, which rank 0 calls with all values; all ranks raise its error.

        For all ranks, with values that are large together: only rank 0 reads them.
        """
        if self._store is None:
            return answer([value])[0]

        def safely(values: list[Any]) -> list[Any]:
            try:
                return [(reply, None) for reply in answer(values)]
            except Exception as error:
                return [(None, error)] * len(values)

        reply, error = self._store.through_first(value, safely)
        if error is not None:
            raise error if self.rank == 0 else told(error)
        return reply


class _Failure(NamedTuple):
    """An error of one rank for the others: the kind that they raise, and its class and message."""

    kind: type[Exception]
    text: str


def is_several() -> bool:
    """Return whether there are several ranks; one in the debug mode. Raises ``RuntimeError`` as ``Exchange`` does."""
    if parallel_state.is_debug():
        return False
    is_alone = (dist.get_world_size() if dist.is_initialized() else _launched()) == 1
    if not is_alone:
        current_state.initialized()
    return not is_alone


def _launched() -> int:
    """Number of processes that a launcher has started; 1 without one."""
    try:
        return launch.world_size()
    except RuntimeError:
        # A shell can have some of a launcher's variables.
        return 1
