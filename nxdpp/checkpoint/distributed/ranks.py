"""The ranks that save or load a checkpoint together."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from nxdpp.agreement.together import Failure, all_together, together
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.ranks import launch, parallel_state
from nxdpp.ranks.store_exchange import StoreExchange

T = TypeVar("T")

# Errors of one rank that the others raise too.
_KINDS = (DamagedFile, OSError, ValueError)


def rank() -> int:
    """Global rank; 0 in a single process."""
    return dist.get_rank() if is_several() else 0


def count() -> int:
    """Number of ranks; 1 in a single process."""
    return dist.get_world_size() if is_several() else 1


def is_several() -> bool:
    """Return whether there are several ranks.

    Raises ``RuntimeError`` for several ranks before ``initialize_model_parallel``, even if only the launcher knows of
    them.
    """
    is_alone = (dist.get_world_size() if dist.is_initialized() else _launched()) == 1
    if not is_alone and not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("a checkpoint is that of all ranks: call parallel_state.initialize_model_parallel() first.")
    return not is_alone


def _launched() -> int:
    """Number of processes that a launcher has started; 1 without one."""
    try:
        return launch.world_size()
    except RuntimeError:
        # A shell can have some of a launcher's variables.
        return 1


def replica() -> tuple[int, int]:
    """This rank's place among the data-parallel replicas, and their number."""
    if not is_several():
        return 0, 1
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()


class Exchange:
    """Values and errors of all ranks. Each method is collective over all ranks, in one thread of each.

    Args:
        name: of the exchange. Without a name it is the exchange of all calls of nxdpp, for the main thread.

    Attributes:
        failures: kinds of the errors of all ranks in the last ``together``; the same on each rank.
    """

    def __init__(self, name: str | None = None) -> None:
        self.rank, self.ranks = rank(), count()
        self.failures: list[type[Exception]] = []
        self._store: StoreExchange | None = None
        if self.ranks > 1:
            ours = parallel_state.get_exchange()
            self._store = ours if name is None else ours.named(name)

    def through_first(self, value: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return this rank's result of ``answer``, which rank 0 calls with the values of all ranks.

        An error of ``answer`` is raised on all ranks.
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
            raise error
        return reply

    def all_of(self, value: T) -> list[T]:
        """Return the value of each rank."""
        return [value] if self._store is None else self._store.gather(value)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0; its error is raised on all ranks."""
        made = self.together(lambda: make() if self.rank == 0 else None)
        return cast(T, self.all_of(made)[0])

    def together(self, act: Callable[[], T]) -> T:
        """Return the result of ``act``, or raise on all ranks.

        A rank that fails raises its own error, others an ``OSError``, ``ValueError`` or ``RuntimeError`` that names it.
        """
        return together(act, gather=self._all_of_outcomes, kinds=_KINDS)

    def all_together(self, act: Callable[[], T]) -> list[T]:
        """Return the results of ``act`` on all ranks, or raise as ``together`` does, in one exchange."""
        return all_together(act, gather=self._all_of_outcomes, kinds=_KINDS)

    def _all_of_outcomes(self, own: tuple[Failure | None, T]) -> list[tuple[Failure | None, T]]:
        """The outcomes of all ranks, whose kinds of errors are kept."""
        everyones = self.all_of(own)
        self.failures = [failure.kind for failure, _ in everyones if failure is not None]
        return everyones
