"""Collective calls of all ranks on a checkpoint, which compare their arguments before anything is changed::

rank 0   optimizer=AdamW ─┐ one exchange ┌─▶ ValueError
rank 1   optimizer=None  ─┴──────────────┴─▶ ValueError: optimizer=None on rank 1, and optimizer=AdamW on rank 0
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.ranks.exchange import Exchange

KINDS = (DamagedFile, OSError, ValueError)
"""Classes of errors of one rank that the other ranks raise too."""


class CollectiveCall(NamedTuple):
    """A collective call of the function ``name`` on one rank.

    ``arguments`` has by name a text of those that must be equal on all ranks. This rank gives the ones in ``of_first``,
    which count on rank 0.
    """

    name: str
    arguments: Mapping[str, str] = {}
    of_first: Sequence[str] = ()


def same_call(exchange: Exchange, describe: Callable[[], CollectiveCall]) -> None:
    """Raise ``ValueError`` on all ranks for calls that differ; collective over all ranks.

    ``describe`` checks the arguments of this rank, and returns its call. Its error is raised on all ranks.
    """
    calls = exchange.all_together(describe)
    for rank, call in enumerate(calls):
        _compare(calls[0], call, rank)


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
