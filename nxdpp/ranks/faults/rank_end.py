"""End of this rank's process because of a fault: in what order ranks print, answer and exit."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from nxdpp.ranks.faults.ending_process import exit_process, print_line, tell_launcher, wait_until
from nxdpp.ranks.faults.local_peers import LocalPeers
from nxdpp.ranks.faults.watch_store import Ending, WatchStore, launcher_has_store, pause_seconds

ANSWER_SECONDS = 3.0  # wait of the failed rank for the other ranks
_PRINT_SECONDS = 5.0  # wait for the failed rank's error; longer than the failed rank waits itself
_DONE_SECONDS = 3.0  # wait of the store's host for the others: torch prints traces when the store is gone
_TRACES_SECONDS = 0.2
_END_SECONDS = 2.0  # wait for the end of the failed rank's process
_AFTERWARDS_SECONDS = 0.3  # torchrun polls every 0.1 s and must see the failed rank exit first


class RankEnd:
    """The end of one rank, which one thread makes; ``hosts`` is ``True`` if this rank has the store.

    ``store_is_gone`` is ``True`` once the store may not answer any more, ``host_has_left`` once its host has ended
    normally.
    """

    def __init__(self, store: WatchStore, peers: LocalPeers, hosts: bool) -> None:
        self.store_is_gone = self.host_has_left = False
        self._store, self._peers, self._hosts = store, peers, hosts
        self._rank, self._world_size = peers.rank, peers.world_size
        self._thread = threading.Lock()

    def begin(self) -> bool:
        """Let this thread make the end. Returns ``False`` where another thread makes it."""
        return self._thread.acquire(blocking=False)

    def has_begun(self) -> bool:
        """Return whether a thread makes the end."""
        return self._thread.locked()

    def wait_for_exit(self) -> NoReturn:
        """Wait for the other thread that ends this process."""
        time.sleep(_PRINT_SECONDS + ANSWER_SECONDS)
        exit_process()

    def stop_for(self, ending: Ending) -> NoReturn:
        """End this process because of ``ending``: after the error of the failed rank, or with the fault's sentence."""
        if not self.begin():
            self.wait_for_exit()
        if self.store_is_gone and not self.host_has_left and not launcher_has_store():
            # Torch prints traces when a request of another thread of this rank loses the store. An agent that loses
            # its store ends this process at once.
            time.sleep(_TRACES_SECONDS)
        is_error = ending.kind == "error"
        where = f": see the traceback of rank {ending.rank}" if is_error else ""
        print_line(f"rank {self._rank} stops because {ending.reason}{where}")
        tell_launcher(f"stops because {ending.reason}", is_consequence=True)
        if 0 not in ending.silent or launcher_has_store():
            # Before the launcher ends this process. A process that has the store comes last.
            self._peers.kill_stopped(ending.silent, waits=False)
        silent = len(ending.silent)
        if not self.store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.answer()
                if is_error:
                    pause = pause_seconds(self._world_size)
                    wait_until(lambda: self._is_printed_or_died(ending.rank), _PRINT_SECONDS, pause)
                    silent += not self._store.is_printed()
                self.finish()
        # A store's host ends last: torch would print traces on the ranks that wait for an entry of the store.
        ends_last = ending.rank == 0 and not launcher_has_store()
        if ending.rank != self._rank and not ends_last and ending.rank not in self._peers.stopped():
            self._peers.wait_for_end(ending.rank, _END_SECONDS)
            time.sleep(_AFTERWARDS_SECONDS)
        self.outlast_others(silent)
        exit_process(lambda: self._peers.kill_stopped(ending.silent, waits=True))

    def print_and_exit(self, print_error: Callable[[], object]) -> NoReturn:
        """End the process of the rank that owns the failure: ``print_error`` runs when the other ranks are silent."""
        self.wait_for_answers(ANSWER_SECONDS)
        print_error()
        if not self.store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.set_printed()
                self.finish()
            self.outlast_others()
        # The normal exit of the interpreter may wait for messages that no rank sends any more.
        exit_process()

    def wait_for_answers(self, seconds: float) -> None:
        """Wait, for a limited time, until all other ranks know of this rank's end or have left."""
        wait_until(lambda: self._count(self._store.answers) >= self._world_size - 1, seconds)

    def finish(self) -> None:
        """Tell the store's host that this rank no longer needs the store."""
        if not self._hosts:
            self._store.finish()

    def outlast_others(self, silent: int = 0) -> None:
        """On the store's host, wait for a limited time until the other ranks no longer need the store."""
        if self._hosts:
            others = self._world_size - 1 - silent
            wait_until(lambda: self._count(self._store.finished) >= others, _DONE_SECONDS)

    def _is_printed_or_died(self, rank: int) -> bool:
        """Return whether ``rank`` has printed its error, or will not: its program caught the error and was killed."""
        return self._store.is_printed() or self._peers.has_ended(rank)

    def _count(self, number: Callable[[], int]) -> int:
        """Return ``number()``; the world size once the store is gone."""
        if not self.store_is_gone:
            try:
                return number()
            except RuntimeError:
                self.store_is_gone = True
        return self._world_size
