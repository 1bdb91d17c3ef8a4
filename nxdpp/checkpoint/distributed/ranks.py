"""The ranks that save or load a checkpoint together, and what they tell each other.

Each rank checks its arguments, and all compare their calls before anything is changed::

    rank 0   optimizer=AdamW ─┐ one exchange ┌─▶ ValueError
    rank 1   optimizer=None  ─┴──────────────┴─▶ ValueError: optimizer=None on rank 1, and optimizer=AdamW on rank 0
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from nxdpp.agreement.together import Failure, all_together, together
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.ranks import launch, parallel_state
from nxdpp.ranks.faults.connection_errors import told
from nxdpp.ranks.store_exchange import StoreExchange

T = TypeVar("T")

_KINDS = (DamagedFile, OSError, ValueError)


def rank() -> int:
    """Global rank; 0 in a single process."""
    return dist.get_rank() if is_several() else 0


def count() -> int:
    """Number of ranks; 1 in a single process."""
    return dist.get_world_size() if is_several() else 1


def is_several() -> bool:
    """Return whether there are several ranks; one in the debug mode.

    Raises ``RuntimeError`` for several ranks before ``initialize_model_parallel``, even if only the launcher knows of
    them.
    """
    if parallel_state.is_debug():
        return False
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

    Without a ``name`` it is the exchange of all calls of nxdpp, for the main thread. Other ranks' errors have
    ``consequence``, a sentence on the state after a failure, and are of the first of ``kinds`` that fits. ``failures``
    has the kinds of the errors of all ranks in the last ``together``; the same on each rank.
    """

    def __init__(
        self, name: str | None = None, consequence: str = "", kinds: Sequence[type[Exception]] = _KINDS
    ) -> None:
        self.rank, self.ranks = rank(), count()
        self._consequence, self._kinds = consequence, kinds
        self.failures: list[type[Exception]] = []
        self._store: StoreExchange | None = None
        if self.ranks > 1:
            ours = parallel_state.get_exchange()
            self._store = ours if name is None else ours.named(name)

    def through_first(self, value: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return this rank's result of ``answer``, which rank 0 calls with all values; all ranks raise its error."""
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

    def all_of(self, value: T) -> list[T]:
        """Return the value of each rank."""
        return [value] if self._store is None else self._store.gather(value)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0; its error is raised on all ranks."""
        made = self.together(lambda: make() if self.rank == 0 else None)
        return cast(T, self.all_of(made)[0])

    def together(self, act: Callable[[], T]) -> T:
        """Return the result of ``act``, or raise on all ranks.

        A rank that fails raises its own error. The others raise the first of the kinds that fits it, or
        ``RuntimeError``, with the rank.
        """
        return together(act, self._consequence, gather=self._all_of_outcomes, kinds=self._kinds)

    def all_together(self, act: Callable[[], T]) -> list[T]:
        """Return the results of ``act`` on all ranks, or raise as ``together`` does, in one exchange."""
        return all_together(act, gather=self._all_of_outcomes, kinds=self._kinds)

    def _all_of_outcomes(self, own: tuple[Failure | None, T]) -> list[tuple[Failure | None, T]]:
        """The outcomes of all ranks, whose kinds of errors are kept."""
        everyones = self.all_of(own)
        self.failures = [failure.kind for failure, _ in everyones if failure is not None]
        return everyones


class CollectiveCall(NamedTuple):
    """A collective call of the function ``name`` on one rank, with a ``note`` that the ranks tell each other.

    ``arguments`` has by name a text of those that must be equal on all ranks. This rank gives the ones in ``of_first``,
    which count on rank 0.
    """

    name: str
    arguments: Mapping[str, str] = {}
    of_first: Sequence[str] = ()
    note: Any = None


def same_call(exchange: Exchange, describe: Callable[[], CollectiveCall]) -> list[Any]:
    """Return the notes of all ranks; collective over all ranks.

    ``describe`` checks the arguments of this rank, and returns its call. Its error is raised on all ranks. Raises
    ``ValueError`` on all ranks for calls that differ.
    """
    calls = exchange.all_together(describe)
    for rank, call in enumerate(calls):
        _compare(calls[0], call, rank)
    return [call.note for call in calls]


def given(value: object) -> str:
    """Text of an argument of which only the class is compared."""
    return "None" if value is None else type(value).__name__


def _compare(first: CollectiveCall, other: CollectiveCall, rank: int) -> None:
    if first.name != other.name:
        raise ValueError(f"rank 0 calls {first.name}, and rank {rank} calls {other.name}: {_REMEDY}")
    for name, text in first.arguments.items():
        if other.arguments[name] != text:
            found = f"{name}={other.arguments[name]} on rank {rank}, and {name}={text} on rank 0"
            raise ValueError(f"{first.name} has {found}: {_REMEDY}")
    lost = [name for name in other.of_first if name not in first.of_first]
    if lost:
        raise ValueError(
            f"{first.name} has {lost[0]}= on rank {rank} and not on rank 0, of which it is taken: give it on rank 0. "
            f"Nothing was changed."
        )


_REMEDY = "make the same call on every rank. Nothing was changed."
