"""Waits for other ranks, which the board shows.

::

    with Wait("average of the gradients", group):        board.wait
        work.wait()                                      "the average of the gradients, with ranks 0 and 2"

The hang watch never takes a rank that waits for the cause of a hang. So each call that waits for another rank is within
a ``Wait``, and nothing else is: no code of the user's, and no file. What a step does for each microbatch assigns a
``Wait`` to ``board.wait``, and ``None`` after it, which costs less than the context. Where a message stops a stream and
not the host, the wait lasts until the stream has passed it (``StreamWaits``).
"""

import threading
from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.counted import counted
from nxdpp.ranks.faults.board import StreamWaits, board

_MOST_NAMES = 8


class Wait:
    """The time in which this rank waits for other ranks in the exchange ``name``; the outermost one is shown.

    Threads other than the one that trains, and autograd's, show nothing. The ranks of ``group`` are named, or the ones
    that this rank waits for: ``ranks`` are numbers in ``group``, and without a group the ranks themselves.
    """

    __slots__ = ("_group", "_name", "_ranks")

    def __init__(self, name: str, group: ProcessGroup | None = None, ranks: Sequence[int] = ()) -> None:
        self._name = name
        self._group = group
        self._ranks = ranks

    def __enter__(self) -> None:
        if board.wait is None and (threading.get_ident() == board.thread or _is_of_autograd()):
            board.wait = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if board.wait is self:
            board.wait = None if board.stream_waits is None else self._on_stream(board.stream_waits, error)

    def _on_stream(self, waits: StreamWaits, error: BaseException | None) -> object:
        """Leave the wait to the stream where the group's messages stop it; what the host shows from then on."""
        if error is None and self._group is not None and dist.get_backend(self._group) != dist.Backend.GLOO:
            waits.add(self)
        return None

    def __str__(self) -> str:
        if not self._ranks and self._group is None:
            return f"the {self._name}"
        own, ranks = dist.get_rank(), self._ranks
        if self._group is not None:
            members = dist.get_process_group_ranks(self._group)
            ranks = [members[number] for number in ranks] if ranks else members
        return f"the {self._name}, with {names([rank for rank in ranks if rank != own])}"


def _is_of_autograd() -> bool:
    """Return whether C++ has started this thread: hooks of a backward on a device run in one of autograd's."""
    return threading.current_thread().name.startswith("Dummy-")


def names(ranks: Sequence[int]) -> str:
    """``"rank 1"``, ``"ranks 0, 1 and 3"`` or a number of ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_NAMES or not ranks:
        return counted(len(ranks), "rank")
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def first_names(ranks: Sequence[int]) -> str:
    """Names of ``ranks``, of many only the first and the number of the others."""
    more = len(ranks) - _MOST_NAMES
    first = ", ".join(map(str, ranks[:_MOST_NAMES]))
    return names(ranks) if more <= 0 else f"ranks {first} and {counted(more, 'other')}"
