"""One rank's part in the failure watch: its threads, and the end of its process.

A thread polls the store for an ending, and waits for the ends of processes on this host. So a killed rank is named at
once by those beside it. A connection error is a consequence: the rank that gets it waits for the cause, then calls the
roll. If rank 0 hosts the store, it announces its normal end. After that each rank judges alone.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in its __all__

from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.faults.connection_errors import is_connection_error
from nxdpp.parallel_layers.faults.ending_process import exit_process, print_line, wait_until
from nxdpp.parallel_layers.faults.hang_watch import HangWatch
from nxdpp.parallel_layers.faults.local_peers import LAUNCHER, LocalPeers
from nxdpp.parallel_layers.faults.other_calls import OtherCalls
from nxdpp.parallel_layers.faults.roll_call import names
from nxdpp.parallel_layers.faults.watch_store import (
    Departure,
    Ending,
    RollCall,
    WatchStore,
    launcher_has_store,
    pause_seconds,
    poll_seconds,
)

_SUSPECT_SECONDS = 1.0  # wait of a connection error for a report of the failure that caused it
_ROLL_CALL_SECONDS = 1.5  # wait for answers, beyond a poll
_ANSWER_SECONDS = 3.0  # wait of the failed rank for the other ranks
_LEAVING_SECONDS = 10.0  # wait of a leaving host for the other ranks
_PRINT_SECONDS = 5.0  # wait for the failed rank's error; longer than the failed rank waits itself
_DONE_SECONDS = 3.0  # wait of the store's host for the others: torch prints traces when the store is gone
_TRACES_SECONDS = 0.2
_END_SECONDS = 2.0  # wait for the end of the failed rank's process
_AFTERWARDS_SECONDS = 0.3  # torchrun polls every 0.1 s and must see the failed rank exit first
_DIED = "died without an error: killed (a signal, no memory), crashed, or ended by os._exit"

_watches = count()


class RankWatch:
    """The watch of one rank, from its construction to ``leave`` or to the end of the process.

    Args:
        store: the world's store, under a prefix of this start.
        hang_timeout: seconds without progress after which the job ends; 0 for no limit.

    Attributes:
        owns_failure: ``True`` if this rank is the first to fail, so that its error is the one to print.
    """

    def __init__(self, store: Store, hang_timeout: float) -> None:
        self.owns_failure = False
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._process = os.getpid()
        self._left = threading.Event()
        self._ends = threading.Lock()
        self._store_is_gone = False
        self._hosts = self._rank == 0 and not launcher_has_store()
        self._notes_departure = threading.Lock()
        self._host_departure: Departure | None = None
        self._mark: object = None
        # On the host this reference keeps the store alive after the process group is destroyed.
        self._world_store = store
        # A main thread that blocks in a call of the store holds that connection, not this one.
        connection = self._world_store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        own_store = PrefixStore(f"nxdpp_failure_watch_{next(_watches)}", connection)
        self._store = WatchStore(own_store)
        self._other_calls = OtherCalls(PrefixStore("calls", own_store), board, self._rank)
        self._peers = LocalPeers(self._store, self._rank, self._world_size)
        self._poll_seconds = poll_seconds(self._world_size)
        self._pause_seconds = pause_seconds(self._world_size)
        self._hangs = HangWatch(self._store, self._peers, self._rank, self._world_size, hang_timeout)
        self._thread = threading.Thread(target=self._watch, name="nxdpp failure watch", daemon=True)
        self._thread.start()
        self._hangs.start(self._left, self._stop_without_store)

    def is_active(self) -> bool:
        """Return whether this process started the watch and has not left it."""
        return not self._left.is_set() and self.is_of_this_process()

    def is_of_this_process(self) -> bool:
        """Return whether this process started the watch, and did not inherit it by a fork."""
        return self._process == os.getpid()

    def report(self, error: BaseException) -> bool:
        """Claim the failure for this rank, or end the process because of an earlier failure of another rank.

        Returns whether this rank owns the failure. It does not once the store's host has left.
        """
        if self.owns_failure or self._left.is_set():
            return self.owns_failure
        if self._ends.locked():
            # The thread ends this process for a failure of another rank, which may have caused this error.
            _wait_for_exit()
        own = Ending("error", self._rank)
        is_consequence = is_connection_error(error)
        addition = f" ({type(error).__name__} here)"
        if self._host_departure is None:
            try:
                ending = self._store.end((self._cause() if is_consequence else None) or own)
            except RuntimeError:
                # Without the store no other rank can be told.
                self._store_is_gone = True
                ending = self._cause_of_lost_store() if is_consequence else own
            if ending.kind != "host left":
                self.owns_failure = ending == own
                if not self.owns_failure:
                    self._stop_for(ending, addition)
                return self.owns_failure
            self._note_host_left(ending)
        cause = self._departed(lost_connection=True) if is_consequence else None
        if cause is not None:
            self._stop_for(cause, addition)
        return False

    def report_exit(self, call: str) -> None:
        """Make the other ranks stop because this rank's program ends within ``call``, by ``SystemExit``."""
        if self._host_departure is not None or not self._ends.acquire(blocking=False):
            return
        sentence = f"rank {self._rank} ended its program within {call} (sys.exit)"
        with contextlib.suppress(RuntimeError):
            ending = self._store.end(Ending("fault", self._rank, sentence))
            print_line(f"rank {self._rank} ends: {ending.sentence or 'another rank failed'}; the other ranks stop")
            self._wait_for_answers(_ANSWER_SECONDS)
            self._finish()
            self._outlast_others()
        self._left.set()

    def end_process(self, print_error: Callable[[], object]) -> NoReturn:
        """End the process of the rank that owns the failure: ``print_error`` runs when the other ranks are silent."""
        self._wait_for_answers(_ANSWER_SECONDS)
        print_error()
        if not self._store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.set_printed()
                self._finish()
            self._outlast_others()
        # The normal exit of the interpreter may wait for messages that no rank sends any more.
        exit_process()

    def leave(self) -> None:
        """End the watch on this rank, which ends normally."""
        if self.owns_failure or self._left.is_set():
            return
        if not self._ends.acquire(blocking=False):
            _wait_for_exit()
        self._left.set()
        self._peers.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_SECONDS)
        if self._host_departure is not None:
            return
        own = Departure(self._rank, dict(board.begun), board.position().last)
        with contextlib.suppress(RuntimeError):
            if self._hosts:
                self._store.end(Ending("host left", self._rank, begun=own.begun, last=own.last))
                self._wait_for_answers(_LEAVING_SECONDS)
            else:
                self._store.leave(own)

    def _watch(self) -> None:
        """Look for faults until this rank leaves; runs in the thread."""
        while not self._left.is_set():
            # The processes of this host are known soon.
            ended = self._peers.wait(self._poll_seconds if self._peers.are_known else self._poll_seconds / 5)
            if self._left.is_set() or self.owns_failure or self._ends.locked():
                return
            if self._host_departure is not None:
                self._look_alone()
                continue
            try:
                with self._hangs.asking():
                    self._look(ended)
            except RuntimeError:
                self._lose_contact()
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
            fault = self._death_of(died[0])
        elif self._is_stuck():
            fault = self._departed() or self._other_call() or self._hangs.find()
        if fault is not None:
            self._act_on(self._store.end(fault))

    def _act_on(self, ending: Ending) -> None:
        if ending.kind == "host left":
            self._note_host_left(ending)
        elif ending.kind == "fault" or ending.rank != self._rank:
            self._stop_for(ending)
        else:
            self.owns_failure = True

    def _note_host_left(self, ending: Ending) -> None:
        with self._notes_departure:
            if self._host_departure is None:
                self._host_departure = Departure(ending.rank, ending.begun, ending.last)
                with contextlib.suppress(RuntimeError):
                    self._store.answer()
                # It may be gone at any time from now on.
                self._store_is_gone = True

    def _look_alone(self) -> None:
        """After the host has left: end if this rank waits for one that has left."""
        fault = self._departed() if self._is_stuck() else None
        if fault is not None:
            self._stop_for(fault)

    def _is_stuck(self) -> bool:
        """Return whether this rank has not moved since the last poll."""
        before, self._mark = self._mark, (board.moves, board.action)
        return before == self._mark

    def _departed(self, lost_connection: bool = False) -> Ending | None:
        """The fault of ranks that have left, and that the present call of this rank needs.

        After a ``lost_connection`` any rank counts: it may have begun this call, refused it, and ended.
        """
        position = board.position()
        if not position.call:
            return None
        departures = [self._host_departure] if self._host_departure else list(self._store.departures().values())
        members = range(self._world_size) if position.scope == "world" else board.members.get(position.scope, ())
        missed = [
            departure
            for departure in departures
            if lost_connection or (departure.rank in members and departure.begun[position.scope] < position.number)
        ]
        if not missed:
            return None
        ranks = sorted(departure.rank for departure in missed)
        last = missed[0].last
        sentence = (
            f"{names(ranks)} ended {'after ' + last if last else 'before any step'}, "
            f"and rank {self._rank} is in {position.call}"
        )
        return Ending("fault", ranks[0], sentence)

    def _other_call(self) -> Ending | None:
        """The fault of ranks that wait for each other in different calls."""
        sentence = self._other_calls.find()
        return None if sentence is None else Ending("fault", self._rank, sentence)

    def _death_of(self, rank: int) -> Ending:
        if rank == LAUNCHER:
            return Ending("fault", self._rank, f"the launcher (torchrun) of rank {self._rank} was killed")
        return Ending("fault", rank, f"rank {rank} {_DIED}", [rank])

    def _cause(self) -> Ending | None:
        """The fault that broke a connection of this rank; ``None`` if this rank alone sees one."""
        deadline = time.monotonic() + _SUSPECT_SECONDS
        while time.monotonic() < deadline:
            if self._ends.locked():
                # The thread ends this process; the store may be gone soon.
                _wait_for_exit()
            state = self._store.state()
            if isinstance(state, Ending):
                return state
            fault = self._departed()
            if fault is not None:
                return fault
            time.sleep(self._pause_seconds)
        verdict = self._hangs.gone(self._poll_seconds + _ROLL_CALL_SECONDS)
        if verdict is None:
            return self._departed(lost_connection=True)
        return Ending("fault", verdict, f"rank {verdict} is gone: it does not answer", [verdict])

    def _cause_of_lost_store(self) -> Ending:
        """The fault that took the store away."""
        # The ends of processes are known before those of connections.
        if threading.current_thread() is self._thread:
            self._peers.wait(0.2)
        else:
            wait_until(lambda: bool(self._peers.ended), 0.2)
        if LAUNCHER in self._peers.ended:
            return self._death_of(LAUNCHER)
        if launcher_has_store():
            return Ending("fault", self._rank, f"rank {self._rank} lost contact with the launcher's store")
        if self._peers.ended:
            return self._death_of(self._peers.ended[0])
        return Ending("fault", 0, "rank 0 died or was killed, and its store with it", [0])

    def _stop_for(self, ending: Ending, addition: str = "") -> NoReturn:
        """End this process because of ``ending``: after the error of the failed rank, or with the fault's sentence."""
        if not self._ends.acquire(blocking=False):
            _wait_for_exit()
        if self._store_is_gone and self._host_departure is None and not launcher_has_store():
            # Torch prints traces when a request of another thread of this rank loses the store. An agent that loses
            # its store ends this process at once.
            time.sleep(_TRACES_SECONDS)
        is_error = ending.kind == "error"
        reason = f"rank {ending.rank} failed{addition}; its error follows" if is_error else ending.sentence + addition
        print_line(f"rank {self._rank} stops because {reason}")
        if 0 not in ending.silent or launcher_has_store():
            # Before the launcher ends this process. A process that has the store comes last.
            self._peers.kill_stopped(ending.silent, waits=False)
        silent = len(ending.silent)
        if not self._store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.answer()
                if is_error:
                    wait_until(lambda: self._is_printed_or_died(ending.rank), _PRINT_SECONDS, self._pause_seconds)
                    silent += not self._store.is_printed()
                self._finish()
        if ending.rank != self._rank and ending.rank not in self._peers.stopped():
            self._peers.wait_for_end(ending.rank, _END_SECONDS)
            time.sleep(_AFTERWARDS_SECONDS)
        self._outlast_others(silent)
        exit_process(lambda: self._peers.kill_stopped(ending.silent, waits=True))

    def _is_printed_or_died(self, rank: int) -> bool:
        """Return whether ``rank`` has printed its error, or will not: its program caught the error and was killed."""
        return self._store.is_printed() or self._peers.has_ended(rank)

    def _lose_contact(self) -> None:
        """End this process because the store is gone, unless the process already ends."""
        self._store_is_gone = True
        if not self.owns_failure and not self._ends.locked():
            self._stop_for(self._cause_of_lost_store())

    def _stop_without_store(self, sentence: str, stopped: list[int]) -> None:
        """End this process because the store does not answer."""
        self._store_is_gone = True
        self._stop_for(Ending("fault", 0, sentence, stopped))

    def _wait_for_answers(self, seconds: float) -> None:
        """Wait, for a limited time, until all other ranks know of this rank's end or have left."""
        wait_until(lambda: self._count(self._store.answers) >= self._world_size - 1, seconds)

    def _finish(self) -> None:
        if not self._hosts:
            self._store.finish()

    def _outlast_others(self, silent: int = 0) -> None:
        """On the store's host, wait for a limited time until the other ranks no longer need the store."""
        if self._hosts:
            others = self._world_size - 1 - silent
            wait_until(lambda: self._count(self._store.finished) >= others, _DONE_SECONDS)

    def _count(self, number: Callable[[], int]) -> int:
        """Return ``number()``; the world size once the store is gone."""
        if not self._store_is_gone:
            try:
                return number()
            except RuntimeError:
                self._store_is_gone = True
        return self._world_size


def _wait_for_exit() -> NoReturn:
    """Wait for another thread that ends this process."""
    time.sleep(_PRINT_SECONDS + _ANSWER_SECONDS)
    exit_process()
