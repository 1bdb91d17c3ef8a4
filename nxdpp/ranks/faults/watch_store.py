"""Entries of the failure watch in the world's store.

One key has the state of the watch. Each rank polls it, and a change is one atomic operation::

    absent ──▶ roll call 1 ──▶ closed 1 ──▶ roll call 2 ──▶ ... ──▶ ending
       └──────────────┴────────────┴─────────────┴────────────────▶ ending, which is final

No request waits for a key. A request raises ``RuntimeError`` when the store is gone.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in its __all__

_T = TypeVar("_T")

_POLL_SECONDS = 0.5
_SLOWEST_POLL_SECONDS = 2.0
_RANKS_PER_POLL = 128  # with more ranks each polls less often: 256 polls a second for up to 512 ranks
_PAUSE_SECONDS = 0.05
_PAUSES_A_SECOND = 2500  # of all ranks together, a tenth of what one store answers

_STATE = "state"
_ANSWERS = "answers"  # number of ranks that know the ending or have left the watch
_PRINTED = "printed"  # present once the failed rank has printed its error
_DONE = "done"  # number of ranks that stop and no longer need the store
_LEFT = "left"  # number of departures; each has a key
_HOST = "host"  # of a rank
_PROCESSES = "processes"  # number of processes of a host; each has a key


@dataclass(frozen=True)
class Ending:
    """The reason for which all ranks stop.

    Attributes:
        kind: ``"error"``: the rank prints its error. ``"fault"``: the ``sentence`` is all that can be told.
            ``"host left"``: the rank that hosts the store ends well, and the watch ends on all ranks.
        rank: the rank that failed.
        sentence: the fault, such as ``"rank 2 died"``, or the class of the error.
        silent: ranks that are dead or stopped, and tell nothing any more.
        begun, last: calls of the store's host, as in ``Departure``.
    """

    kind: Literal["error", "fault", "host left"]
    rank: int
    sentence: str = ""
    silent: list[int] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    last: str = ""

    @property
    def reason(self) -> str:
        """The clause that names the failed rank."""
        return f"rank {self.rank} failed with {self.sentence}" if self.kind == "error" else self.sentence


@dataclass(frozen=True)
class RollCall:
    """A request of rank ``by`` that each rank tells where it is; it is open until it is judged.

    ``goes_on`` is ``True`` if ranks wait for one that is outside of nxdpp.
    """

    number: int
    by: int
    is_open: bool = True
    goes_on: bool = False


@dataclass(frozen=True)
class Departure:
    """A rank that has left the watch well: its calls by scope, and the text of the last one."""

    rank: int
    begun: dict[str, int]
    last: str


State = Ending | RollCall | None


class WatchConnection:
    """The requests of ``store`` that the failure watch makes, from all threads of a rank, one at a time.

    After ``add_last`` each request raises ``RuntimeError``, as after the loss of the store. The host of the store ends
    once every other rank has said that it no longer needs the store. A thread of such a rank that asked later would let
    torch print the trace of a lost connection after the last line of the rank.

    Attributes:
        host_has_ended: tells whether the process that has the store is known to have ended. Torch would print the
            trace of each request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._is_closed = False
        self.host_has_ended: Callable[[], bool] = lambda: False

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the value of ``key``, 0 at first, and return the sum."""
        return self._ask(lambda: self._store.add(key, number))

    def add_last(self, key: str) -> None:
        """Add 1 to the value of ``key``; the last request of this rank."""
        self._ask(lambda: self._store.add(key, 1), is_last=True)

    def set(self, key: str, value: str) -> None:
        """Write an entry."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Read an entry, which must be there."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all entries are there."""
        return self._ask(lambda: self._store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` where the entry is ``expected``, and return the entry afterwards."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def _ask(self, request: Callable[[], _T], is_last: bool = False) -> _T:
        with self._turn:
            if self._is_closed:
                raise RuntimeError("this rank has made its last request of the failure watch's store")
            if self.host_has_ended():
                raise RuntimeError("the process that has the failure watch's store has ended")
            self._is_closed = is_last
            return request()


class WatchStore:
    """The entries of one watch. ``store`` has a prefix of its own, and a connection of its own.

    ``connection`` takes no more requests after ``leave`` or ``finish``.
    """

    def __init__(self, store: Store) -> None:
        self.connection = WatchConnection(store)
        self._reads_departures = threading.Lock()
        self._departures: dict[int, Departure] = {}
        self._departures_read = 0

    def state(self) -> State:
        """The present state."""
        text = self._read(_STATE)
        return None if text is None else _decoded(text)

    def end(self, ending: Ending) -> Ending:
        """Make ``ending`` the state; returns the ending of the first rank that did."""
        while True:
            before = self._read(_STATE) or ""
            state = _decoded(before) if before else None
            if isinstance(state, Ending):
                return state
            if self._replace(before, ending):
                return ending

    def open_roll_call(self, rank: int) -> RollCall | None:
        """Start a roll call of ``rank``; ``None`` if another state came first."""
        before = self._read(_STATE) or ""
        state = _decoded(before) if before else None
        if isinstance(state, Ending) or (state is not None and state.is_open and state.by != rank):
            return None
        call = RollCall(1 if state is None else state.number + 1, rank)
        return call if self._replace(before, call) else None

    def close_roll_call(self, call: RollCall, goes_on: bool = False) -> None:
        """End a roll call without an ending."""
        self._replace(_encoded(call), RollCall(call.number, call.by, is_open=False, goes_on=goes_on))

    def answer_roll_call(self, call: RollCall, rank: int, answer: dict[str, Any]) -> None:
        """Write the answer of ``rank``."""
        self.connection.set(f"roll call {call.number}/{rank}", json.dumps(answer))
        self.connection.add(f"roll call {call.number}", 1)

    def number_of_answers(self, call: RollCall) -> int:
        """Number of ranks that have answered."""
        return self.connection.add(f"roll call {call.number}", 0)

    def answer_of(self, call: RollCall, rank: int) -> dict[str, Any] | None:
        """The answer of ``rank``, if it has come."""
        text = self._read(f"roll call {call.number}/{rank}")
        answer: dict[str, Any] | None = None if text is None else json.loads(text)
        return answer

    def leave(self, departure: Departure) -> None:
        """Note that a rank leaves the watch."""
        number = self.connection.add(_LEFT, 1)
        self.connection.set(f"{_LEFT}/{number}", json.dumps(asdict(departure)))
        self.connection.add(_DONE, 1)
        # The host of the store may end now.
        self.connection.add_last(_ANSWERS)

    def departures(self) -> dict[int, Departure]:
        """The ranks that have left."""
        with self._reads_departures:
            count = self.connection.add(_LEFT, 0)
            while self._departures_read < count:
                text = self._read(f"{_LEFT}/{self._departures_read + 1}")
                if text is None:
                    # The rank is between its two requests.
                    break
                departure = Departure(**json.loads(text))
                self._departures[departure.rank] = departure
                self._departures_read += 1
            return dict(self._departures)

    def add_process(self, host: str, process: dict[str, int]) -> None:
        """Note a process of ``host``, and the name that people know this host by."""
        self.connection.set(f"{_HOST}/{process['rank']}", os.uname().nodename)
        number = self.connection.add(f"{_PROCESSES}/{host}", 1)
        self.connection.set(f"{_PROCESSES}/{host}/{number}", json.dumps(process))
        self.connection.add(_PROCESSES, 1)

    def host_of(self, rank: int) -> str:
        """The name of the host of ``rank``; ``"?"`` if the rank has not noted it."""
        return self._read(f"{_HOST}/{rank}") or "?"

    def number_of_processes(self) -> int:
        """Number of processes that are noted, on all hosts."""
        return self.connection.add(_PROCESSES, 0)

    def processes(self, host: str, known: int) -> list[dict[str, int]]:
        """The processes of ``host`` after the first ``known`` ones, as far as they are noted."""
        found = []
        for number in range(known + 1, self.connection.add(f"{_PROCESSES}/{host}", 0) + 1):
            text = self._read(f"{_PROCESSES}/{host}/{number}")
            if text is None:
                break
            found.append(json.loads(text))
        return found

    def answer(self) -> None:
        """Count this rank among the ranks that know the ending."""
        self.connection.add(_ANSWERS, 1)

    def answers(self) -> int:
        """Number of ranks that know the ending or have left."""
        return self.connection.add(_ANSWERS, 0)

    def finish(self) -> None:
        """Count this rank, which is not the host, among the ranks that no longer need the store. The last request."""
        self.connection.add_last(_DONE)

    def finished(self) -> int:
        """Number of ranks that no longer need the store."""
        return self.connection.add(_DONE, 0)

    def set_printed(self) -> None:
        """Note that the failed rank has printed its error."""
        self.connection.set(_PRINTED, "yes")

    def is_printed(self) -> bool:
        """Return whether the failed rank has printed its error."""
        return self.connection.check([_PRINTED])

    def _read(self, key: str) -> str | None:
        if not self.connection.check([key]):
            return None
        return self.connection.get(key).decode()

    def _replace(self, before: str, state: Ending | RollCall) -> bool:
        after = _encoded(state)
        return self.connection.compare_set(_STATE, before, after).decode() == after


def poll_seconds(world_size: int) -> float:
    """Seconds between two polls of a rank in a job that runs."""
    return min(max(_POLL_SECONDS, _POLL_SECONDS * world_size / _RANKS_PER_POLL), _SLOWEST_POLL_SECONDS)


def pause_seconds(world_size: int) -> float:
    """Seconds between two requests of a rank where all ranks wait for the same entry."""
    return max(_PAUSE_SECONDS, world_size / _PAUSES_A_SECOND)


def launcher_has_store() -> bool:
    """Return whether the launcher, and not rank 0, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _encoded(state: Ending | RollCall) -> str:
    return json.dumps({"is": type(state).__name__, **asdict(state)})


def _decoded(text: str) -> Ending | RollCall:
    values = json.loads(text)
    return Ending(**values) if values.pop("is") == "Ending" else RollCall(**values)
