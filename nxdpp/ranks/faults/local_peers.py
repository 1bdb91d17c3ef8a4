"""Processes of the other ranks on this host: a rank knows at once that one of them has ended.

Each rank writes its process into the store, under the name of its host. A file descriptor of each process (Linux,
``pidfd_open``) becomes readable when the process ends, however it ends. The launcher, torchrun's agent, is watched too.
"""

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path

from nxdpp.ranks.faults.watch_store import WatchStore

_OTHERS_SECONDS = 1.0  # wait for the end of each other rank

LAUNCHER = -1
"""Stands for the launcher among the ranks."""


class LocalPeers:
    """The other ranks on this host, as far as they are known.

    ``ended`` has ranks whose processes have ended, the first one first. ``are_known`` is ``True`` once the host's are.
    ``rank`` is this one, of ``world_size``.
    """

    def __init__(self, store: WatchStore, rank: int, world_size: int) -> None:
        self.ended: list[int] = []
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._host = _host()
        self._known = 0
        self.are_known = False
        self._processes: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        self._poll = select.poll()
        self._wake, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._poll.register(self._wake, select.POLLIN)
        store.add_process(self._host, {"rank": rank, "process": os.getpid(), "started": _started(os.getpid()) or 0})
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            self._add(LAUNCHER, os.getppid())

    def wait(self, seconds: float) -> list[int]:
        """Wait for ``seconds``, or until processes end; returns their ranks."""
        ended = [descriptor for descriptor, _ in self._poll.poll(seconds * 1000) if descriptor != self._wake]
        ranks = []
        for descriptor in ended:
            self._poll.unregister(descriptor)
            ranks += [rank for rank, known in self._descriptors.items() if known == descriptor]
        self.ended += ranks
        return ranks

    def find(self) -> list[int]:
        """Look for processes in the store until all ranks are there; return the ones that have ended already."""
        if self.are_known:
            return []
        # Asked before the processes are read: none is missed then.
        is_complete = self._store.number_of_processes() >= self.world_size
        ended = []
        for entry in self._store.processes(self._host, self._known):
            self._known += 1
            rank, process = entry["rank"], entry["process"]
            if rank != self.rank and not self._add(rank, process, entry["started"]):
                ended.append(rank)
        self.are_known = is_complete
        self.ended += ended
        return ended

    def close(self) -> None:
        """Give back all descriptors; no other method may be called afterwards."""
        for descriptor in (self._wake, self._wakes, *self._descriptors.values()):
            os.close(descriptor)

    def wake(self) -> None:
        """End a ``wait`` of another thread."""
        with contextlib.suppress(OSError):
            os.write(self._wakes, b"x")

    def stopped(self) -> list[int]:
        """Ranks whose processes are stopped by a signal."""
        return [rank for rank in self._processes if self.state_of(rank) in ("T", "t")]

    def running(self) -> list[int]:
        """Ranks whose processes exist and are not stopped."""
        return [rank for rank in self._processes if rank not in self.ended and self.state_of(rank) in tuple("RSDI")]

    def state_of(self, rank: int) -> str:
        """The letter of Linux for the state of a process; ``""`` if it is not known."""
        fields = _stat(self._processes[rank]) if rank in self._processes else None
        return fields[0] if fields else ""

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is known to have ended."""
        return rank in self.ended or self.wait_for_end(rank, 0.0)

    def wait_for_end(self, rank: int, seconds: float) -> bool:
        """Return whether the process of ``rank`` ends in time; at once ``False`` for a rank of another host."""
        if rank not in self._descriptors:
            return False
        poll = select.poll()
        poll.register(self._descriptors[rank], select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def kill_stopped(self, ranks: Sequence[int], waits: bool) -> None:
        """Kill the ``ranks`` that are stopped by a signal: they cannot end themselves.

        With ``waits`` the last rank of this host does it, after the ends of the others.
        """
        stopped = set(self.stopped()) & set(ranks)
        others = self._processes.keys() - stopped
        if waits and stopped and any(rank > self.rank for rank in others):
            return
        if waits and stopped:
            for rank in others:
                self.wait_for_end(rank, _OTHERS_SECONDS)
        for rank in stopped & self._descriptors.keys():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptors[rank], signal.SIGKILL)

    def _add(self, rank: int, process: int, started: int | None = None) -> bool:
        """Watch a process; returns ``False`` if it has ended already."""
        if not hasattr(os, "pidfd_open"):
            return True
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            return False
        except OSError:
            # An old kernel or a sandbox: the end of the process is seen by its connections.
            return True
        if started and _started(process) not in (None, started):
            # Another process has the number by now.
            os.close(descriptor)
            return False
        if rank != LAUNCHER:
            self._processes[rank] = process
        self._descriptors[rank] = descriptor
        self._poll.register(descriptor, select.POLLIN)
        return True


def _host() -> str:
    """A name of this machine, and of the processes that can see each other on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"


def _started(process: int) -> int | None:
    """Time at which a process has started, in ticks since the boot."""
    fields = _stat(process)
    return int(fields[19]) if fields else None


def _stat(process: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on; the name before them may have any characters."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
