"""Causes of a fault, as one rank sees them: deaths, departures, other calls, a lost connection, a lost store."""

import os
import time
from collections.abc import Callable

from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.connection_errors import is_collective_error
from nxdpp.ranks.faults.ending_process import wait_until
from nxdpp.ranks.faults.hang_watch import HangWatch
from nxdpp.ranks.faults.local_peers import LAUNCHER, LocalPeers
from nxdpp.ranks.faults.other_calls import OtherCalls
from nxdpp.ranks.faults.rank_end import RankEnd
from nxdpp.ranks.faults.waits import names
from nxdpp.ranks.faults.watch_store import (
    Departure,
    Ending,
    WatchStore,
    launcher_has_store,
    pause_seconds,
    poll_seconds,
)

_SUSPECT_SECONDS = 1.0  # wait of a connection error for a report of the failure that caused it
_TOLD_SECONDS = 3.0  # wait of a told error for the report of the rank that told it, which may also catch it
_ROLL_CALL_SECONDS = 1.5  # wait for answers, beyond a poll
_DIED = "died without an error: killed by a signal or out of memory, crashed, or ended by os._exit"


class Causes:
    """Causes of the end of one rank; ``end`` may be made by another thread meanwhile.

    ``host_departure`` is the departure of the rank that has the store; ``None`` before.
    """

    def __init__(self, store: WatchStore, peers: LocalPeers, hangs: HangWatch, end: RankEnd) -> None:
        self.host_departure: Departure | None = None
        self._store, self._peers, self._hangs, self._end = store, peers, hangs, end
        self._rank, self._world_size = peers.rank, peers.world_size
        self._other_calls = OtherCalls(store.connection, board, peers.rank)

    def departed(self, error: BaseException | None = None) -> Ending | None:
        """The fault of ranks that have left, and that the present call of this rank needs.

        After the ``error`` of a lost connection any rank counts: it may have begun this call, refused it, and ended.
        Outside of calls the error must be one of a collective of torch; on a device that fails without an error, and
        the script stands in it.
        """
        position = board.position() if error is None else board.position_of(error)
        stands = error is None and not position.call and self._hangs.stands_in_collective()
        if not position.call and not stands and (error is None or not is_collective_error(error)):
            return None
        departures = [self.host_departure] if self.host_departure else list(self._store.departures().values())
        members = range(self._world_size) if position.scope == "world" else board.members.get(position.scope, ())
        missed = [
            departure
            for departure in departures
            if stands
            or error is not None
            or (departure.rank in members and departure.begun[position.scope] < position.number)
        ]
        if not missed:
            return None
        ranks = sorted(departure.rank for departure in missed)
        last = missed[0].last
        place = f"in {position.call}" if position.call else f"in a collective {position}"
        sentence = (
            f"{names(ranks)} ended {'after ' + last if last else 'before any step'}, and rank {self._rank} is {place}"
        )
        return Ending("fault", ranks[0], sentence)

    def other_call(self) -> Ending | None:
        """The fault of ranks that wait for each other in different calls."""
        sentence = self._other_calls.find()
        return None if sentence is None else Ending("fault", self._rank, sentence)

    def death_of(self, rank: int) -> Ending:
        """The fault of ``rank``, or of the launcher, whose process has ended."""
        if rank == LAUNCHER:
            return Ending("fault", self._rank, f"the launcher (torchrun) of rank {self._rank} was killed")
        return Ending("fault", rank, f"rank {rank} {_DIED}", [rank])

    def of_lost_connection(self, error: BaseException) -> Ending | None:
        """The fault that broke a connection of this rank, with ``error``; ``None`` if only this rank sees one."""
        fault = self._awaited(_SUSPECT_SECONDS, self.departed)
        if fault is not None:
            return fault
        gone = self._hangs.gone(poll_seconds(self._world_size) + _ROLL_CALL_SECONDS)
        if not gone:
            state = self._store.state()
            return state if isinstance(state, Ending) else self.departed(error)
        hosts = sorted({self._store.host_of(rank) for rank in gone})
        on = f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
        does = "is gone: it does not answer" if len(gone) == 1 else "are gone: they do not answer"
        return Ending("fault", gone[0], f"{names(gone)} on {on} {does}", gone)

    def of_told_error(self) -> Ending | None:
        """The ending by the rank that told its error to this one; ``None`` if that rank has caught it."""
        return self._awaited(_TOLD_SECONDS, lambda: None)

    def _awaited(self, seconds: float, find: Callable[[], Ending | None]) -> Ending | None:
        """The ending that another rank reports within ``seconds``, or that this rank can ``find``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # The connections of a process end shortly before the process.
            time.sleep(pause_seconds(self._world_size))
            if self._end.has_begun():
                # The thread ends this process; the store may be gone soon.
                self._end.wait_for_exit()
            state = self._store.state()
            if isinstance(state, Ending):
                return state
            fault = find()
            if fault is not None:
                return fault
        return None

    def of_lost_store(self, polls: bool) -> Ending:
        """The fault that took the store away; ``polls`` is ``True`` on the thread that waits for the ends of peers."""
        # The end of a process is known before the end of its connections.
        if polls:
            self._peers.wait(0.2)
        else:
            wait_until(lambda: bool(self._peers.ended), 0.2)
        if LAUNCHER in self._peers.ended:
            return self.death_of(LAUNCHER)
        if launcher_has_store():
            host = os.environ.get("MASTER_ADDR", "its host")
            sentence = f"the launcher's store, on {host}, is gone: this host, or torchrun on it, has ended"
            return Ending("fault", self._rank, sentence)
        if self._peers.ended:
            return self.death_of(self._peers.ended[0])
        return Ending("fault", 0, "rank 0 died or was killed, and its store with it", [0])
