"""The same call on all ranks: each rank checks its arguments, and all compare them before anything is changed.

::

    rank 0   optimizer=AdamW ─┐ one exchange ┌─▶ ValueError
    rank 1   optimizer=None  ─┴──────────────┴─▶ ValueError: optimizer=None on rank 1, and optimizer=AdamW on rank 0
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nxdpp.checkpoint.distributed.ranks import Exchange


class CollectiveCall(NamedTuple):
    """A collective call of one rank.

    Attributes:
        name: of the function.
        arguments: text by name of the arguments that must be equal on all ranks.
        of_first: names of arguments that count on rank 0, and that this rank gives.
        note: a value that the ranks tell each other.
    """

    name: str
    arguments: Mapping[str, str] = {}
    of_first: Sequence[str] = ()
    note: Any = None


def same_call(exchange: Exchange, describe: Callable[[], CollectiveCall]) -> list[Any]:
    """Return the notes of all ranks; collective over all ranks.

    Args:
        exchange: of all ranks.
        describe: checks the arguments of this rank, and returns its call. Its error is raised on all ranks.

    Raises ``ValueError`` on all ranks for calls that differ.
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
