"""The ranks that load a directory together.

::

    host a   rank 0   reads the headers ──▶ ranks 1, 2, 3
    host b   rank 4   reads the headers ──▶ ranks 5, 6, 7
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nxdpp.agreement.together import from_all_ranks, together
from nxdpp.checkpoint.huggingface.contents import Contents, read_contents, unpacked
from nxdpp.ranks import parallel_state

T = TypeVar("T")


class LoadingRanks:
    """All ranks of a job, or only this process in the debug mode. Each method is collective over them.

    Args:
        directory: the directory that they load.

    Attributes:
        rank: number of this rank; 0 in the debug mode.
        count: number of ranks; 1 in the debug mode.

    Raises ``RuntimeError`` before ``initialize_model_parallel``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        world = None if parallel_state.is_debug() else parallel_state.get_world_group()
        self.rank, self.count = (0, 1) if world is None else (world.rank(), world.size())
        self._is_alone = self.count == 1

    def together(self, act: Callable[[], T]) -> T:
        """Return the result of ``act``; an error of one rank is raised on all, see ``all_ranks.together``."""
        return act() if self._is_alone else together(act, f"{self._directory} was not loaded")

    def all_of(self, value: T) -> list[T]:
        """Return the value of each rank."""
        return [value] if self._is_alone else from_all_ranks(value)

    def contents(self) -> Contents:
        """Return the contents of the directory, which one rank of each host reads.

        Ranks are of one host if they see the directory as the same one: not in containers with other file systems.
        """
        if self._is_alone:
            return read_contents(self._directory)
        views = self.all_of(_view(self._directory))
        own = [rank for rank, view in enumerate(views) if view == views[self.rank]]
        read = read_contents(self._directory) if own[0] == self.rank else None
        packed = None if read is None or len(own) == 1 else read.packed()
        given = parallel_state.get_exchange().from_leader(own[0], len(own) - 1, packed or b"")
        return unpacked(given) if read is None else read


def _view(directory: Path) -> tuple[str, str, int, int]:
    """The host, the directory's path, and its identity there: zeros if it cannot be found."""
    try:
        status = os.stat(directory)
        identity = status.st_dev, status.st_ino
    except OSError:
        identity = 0, 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}", str(directory), *identity
