"""One rank's part in the failure watch: its thread, and the claim of a failure.

A thread polls the store for an ending, and waits for the ends of processes on this host. So a killed rank is named at
once by its neighbours. A connection error is a consequence: the rank that gets it waits for the cause, then calls the
roll. If rank 0 hosts the store, it announces its normal end. After that each rank judges for itself.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from itertools import count
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in its __all__

from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.causes import Causes
from nxdpp.ranks.faults.connection_errors import is_connection_error, is_told
from nxdpp.ranks.faults.ending_process import print_line
from nxdpp.ranks.faults.hang_watch import HangWatch
from nxdpp.ranks.faults.local_peers import LAUNCHER, LocalPeers
from nxdpp.ranks.faults.rank_end import ANSWER_SECONDS, RankEnd
from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.faults.watch_store import Departure, Ending, RollCall, WatchStore, launcher_has_store, poll_seconds

_LEAVING_SECONDS = 10.0  # wait of a leaving host for the other ranks

_watches = count()


class RankWatch:
    """The watch of one rank, from its construction to ``leave`` or to the end of the process.

    ``owns_failure`` is ``True`` if this rank is the first to fail, so that its error is the one to print. ``process``
    started the watch; a fork inherits it.
    """

    def __init__(self, store: Store, timeouts: Timeouts) -> None:
        self.owns_failure = False
        self._rank, world_size = dist.get_rank(), dist.get_world_size()
        self.process = os.getpid()
        self._left = threading.Event()
        self._hosts = self._rank == 0 and not launcher_has_store()
        self._notes_departure = threading.Lock()
        self._mark: object = None
        # On the host this reference keeps the store alive after the process group is destroyed.
        self._world_store = store
        # A main thread that blocks in a call of the store holds that connection, not this one.
        connection = self._world_store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = WatchStore(PrefixStore(f"nxdpp_failure_watch_{next(_watches)}", connection))
        self._peers = LocalPeers(self._store, self._rank, world_size)
        if not launcher_has_store():
            self._store.connection.host_has_ended = lambda: self._peers.has_ended(0)
        self._poll_seconds = poll_seconds(world_size)
        self._hangs = HangWatch(self._store, self._peers, timeouts)
        self._end = RankEnd(self._store, self._peers, self._hosts)
        self._causes = Causes(self._store, self._peers, self._hangs, self._end)
        self._thread = threading.Thread(target=self._watch, name="nxdpp failure watch", daemon=True)
        self._thread.start()
        self._hangs.start(self._left, self._stop_without_store)

    def is_active(self) -> bool:
        """Return whether this process started the watch and has not left it."""
        return not self._left.is_set() and self.process == os.getpid()

    def report(self, error: BaseException) -> bool:
        """Claim the failure for this rank, or end the process because of an earlier failure of another rank.

        Returns whether this rank owns the failure. It does not once the store's host has left.
        """
        if self.owns_failure or self._left.is_set():
            return self.owns_failure
        if self._end.has_begun():
            # The thread ends this process for a failure of another rank, which may have caused this error.
            self._end.wait_for_exit()
        own = Ending("error", self._rank, type(error).__name__)
        is_consequence = not is_told(error) and is_connection_error(error)
        if self._causes.host_departure is None:
            try:
                ending = self._store.end(self._cause_of(error, is_consequence) or own)
            except RuntimeError:
                # Without the store no other rank can be told.
                self._end.store_is_gone = True
                ending = self._cause_of_lost_store() if is_consequence else own
            if ending.kind != "host left":
                self.owns_failure = ending == own
                if self.owns_failure and is_consequence:
                    error.add_note(
                        f"nxdpp: rank {self._rank} lost a connection, and no other rank has failed, ended or stopped "
                        f"answering: look at the network between the hosts."
                    )
                if not self.owns_failure:
                    self._end.stop_for(ending)
                return self.owns_failure
            self._note_host_left(ending)
        cause = self._causes.departed(error) if is_consequence else None
        if cause is not None:
            self._end.stop_for(cause)
        return False

    def report_exit(self, call: str) -> None:
        """Make the other ranks stop because this rank's program ends within ``call``, by ``SystemExit``."""
        if self._causes.host_departure is not None or not self._end.begin():
            return
        sentence = f"rank {self._rank} ended its program within {call} (sys.exit)"
        with contextlib.suppress(RuntimeError):
            ending = self._store.end(Ending("fault", self._rank, sentence))
            print_line(f"rank {self._rank} ends: {ending.reason}; the other ranks stop")
            self._end.wait_for_answers(ANSWER_SECONDS)
            self._end.finish()
            self._end.outlast_others()
        self._left.set()

    def end_process(self, print_error: Callable[[], object]) -> NoReturn:
        """End the process of the rank that owns the failure: ``print_error`` runs when the other ranks are silent."""
        self._end.print_and_exit(print_error)

    def leave(self) -> None:
        """End the watch on this rank, which ends normally."""
        if self.owns_failure or self._left.is_set():
            return
        if not self._end.begin():
            self._end.wait_for_exit()
        self._left.set()
        self._peers.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_SECONDS)
        if self._causes.host_departure is None:
            self._depart()
        if not self._thread.is_alive():
            self._peers.close()

    def _depart(self) -> None:
        """Tell the other ranks that this one ends well."""
        own = Departure(self._rank, dict(board.begun), board.position().last)
        try:
            if self._hosts:
                self._store.end(Ending("host left", self._rank, begun=own.begun, last=own.last))
                self._end.wait_for_answers(_LEAVING_SECONDS)
            else:
                self._store.leave(own)
        except RuntimeError:
            # Torch has printed its traces of the lost store, which name no rank.
            print_line(f"rank {self._rank} ends well, but {self._causes.of_lost_store(polls=True).sentence}")

    def _watch(self) -> None:
        """Look for faults until this rank leaves; runs in the thread."""
        while not self._left.is_set():
            # The processes of this host are known soon.
            ended = self._peers.wait(self._poll_seconds if self._peers.are_known else self._poll_seconds / 5)
            if self._left.is_set() or self.owns_failure or self._end.has_begun():
                return
            if self._causes.host_departure is not None:
                # The rank looks without the store, whether it waits for one that has left.
                fault = self._causes.departed() if self._is_stuck() else None
                if fault is not None:
                    self._end.stop_for(fault)
                continue
            try:
                with self._hangs.asking():
                    self._look(ended)
            except RuntimeError:
                # The store is gone; this process may end already.
                self._end.store_is_gone = True
                if not self.owns_failure and not self._end.has_begun():
                    self._end.stop_for(self._cause_of_lost_store())
                return

    def _look(self, ended: list[int]) -> None:
        """Act on an ending, a roll call, ended processes, departures and a hang."""
        state = self._store.state()
        if isinstance(state, Ending):
            self._act_on(state)
            return
        if isinstance(state, RollCall):
            self._hangs.answer(state)
        ended = [*ended, *self._peers.find()]
        died = [rank for rank in ended if rank == LAUNCHER or rank not in self._store.departures()]
        fault: Ending | None = None
        if died:
            fault = self._causes.death_of(died[0])
        elif self._is_stuck():
            fault = self._causes.departed() or self._causes.other_call() or self._hangs.find()
        if fault is not None:
            self._act_on(self._store.end(fault))

    def _act_on(self, ending: Ending) -> None:
        if ending.kind == "host left":
            self._note_host_left(ending)
        elif ending.kind == "fault" or ending.rank != self._rank:
            self._end.stop_for(ending)
        else:
            self.owns_failure = True

    def _note_host_left(self, ending: Ending) -> None:
        with self._notes_departure:
            if self._causes.host_departure is None:
                self._causes.host_departure = Departure(ending.rank, ending.begun, ending.last)
                self._end.host_has_left = True
                with contextlib.suppress(RuntimeError):
                    self._store.answer()
                # It may be gone at any time from now on.
                self._end.store_is_gone = True

    def _is_stuck(self) -> bool:
        """Return whether this rank has not moved since the last poll."""
        before, self._mark = self._mark, (board.moves, board.action)
        return before == self._mark

    def _stop_without_store(self, sentence: str, stopped: list[int]) -> None:
        """End this process because the store does not answer."""
        self._end.store_is_gone = True
        self._end.stop_for(Ending("fault", 0, sentence, stopped))

    def _cause_of(self, error: BaseException, is_of_connection: bool) -> Ending | None:
        """The ending by another rank that ``error`` only tells of."""
        if is_of_connection:
            return self._causes.of_lost_connection(error)
        return self._causes.of_told_error() if is_told(error) else None

    def _cause_of_lost_store(self) -> Ending:
        return self._causes.of_lost_store(polls=threading.current_thread() is self._thread)
