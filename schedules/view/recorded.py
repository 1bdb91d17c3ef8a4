"""Steps that were really run, from the Chrome trace that ``trace_file_path`` writes.

Times are milliseconds; a step begins with its first compute action.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.check import ScheduleError, check
from nxdpp.schedules.simulate import Span, Timeline, timeline_of

_COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
_KINDS = {kind.value: kind for kind in _COMPUTES}
_WAITS = ("wait", "wait sent", "wait layouts")
_STARTS = ("send", "receive")


class Interval(NamedTuple):
    """From when to when."""

    start: float
    end: float


class Wait(NamedTuple):
    """A wait of stage ``user`` for what stage ``maker`` sent of a microbatch; ``kind`` is that of both actions."""

    kind: str
    maker: int
    user: int
    microbatch: int
    wait: Interval


@dataclass
class RankRecord:
    """What a rank did: compute actions in order, waits for others, and calls that start sends and receives."""

    computes: list[Span] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    starts: list[Interval] = field(default_factory=list)
    arrivals: list[Wait] = field(default_factory=list)


@dataclass(frozen=True)
class RecordedStep:
    """A whole step of all ranks; ``name`` tells its number and kind."""

    name: str
    ranks: list[RankRecord]

    @property
    def schedule(self) -> Schedule:
        """The compute actions of each rank, in the order in which they ran."""
        return [[span.action for span in rank.computes] for rank in self.ranks]

    @property
    def timeline(self) -> Timeline:
        """As it was."""
        return timeline_of([rank.computes for rank in self.ranks])

    def waited(self, rank: int) -> float:
        """How long a rank waited for others, from the first compute action of all ranks to the last one."""
        return _length(self.ranks[rank].waits, self.timeline.makespan)

    def started(self, rank: int) -> float:
        """How long it spent on starting sends and receives in that time, without waits."""
        record, makespan = self.ranks[rank], self.timeline.makespan
        return _length(record.waits + record.starts, makespan) - _length(record.waits, makespan)


class RecordedTimeline:
    """The steps in a trace.

    Raises ``ValueError`` for a file that cannot be read or is no trace of a pipeline.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        events = _read(path)
        self._events: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        try:
            self._ranks = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
            for event in events:
                if event["ph"] == "X":
                    self._events[event["args"]["step"]].append(event)
            self.whole = [number for number in sorted(self._events) if self._is_whole(number)]
        except (KeyError, TypeError, AttributeError, IndexError):
            self._ranks = set()
        if not self._ranks or self._ranks != set(range(len(self._ranks))):
            raise ValueError(
                f"{path} is no trace of a pipeline. Give a file that NxDPPModel(..., trace_file_path=...) wrote."
            )

    def step(self, number: int | None = None) -> RecordedStep:
        """A step by its number, by default the last whole one; ``ValueError`` where there is none."""
        if number is None:
            if not self.whole:
                raise ValueError(f"{self._path} has no whole step: the run ended before its first step did.")
            number = self.whole[-1]
        elif number not in self.whole:
            what = "was cut short" if number in self._events else "is not there"
            raise ValueError(f"step {number} {what} in {self._path}; whole steps: {_ranges(self.whole) or 'none'}.")
        return self._build(number)

    def describe(self) -> str:
        """Which steps there are; there is a whole one."""
        cut = [number for number in sorted(self._events) if number not in self.whole]
        return f"steps {_ranges(self.whole)}" + (f"; cut short: {_ranges(cut)}" if cut else "")

    def _is_whole(self, number: int) -> bool:
        steps = {event["tid"] for event in self._events[number] if event.get("cat") == "step"}
        if steps != self._ranks:
            return False
        try:
            check(self._build(number).schedule)
        except ScheduleError:
            return False
        return True

    def _build(self, number: int) -> RecordedStep:
        events = self._events[number]
        origin = min((event["ts"] for event in events if event["cat"] == "compute"), default=0.0)
        ranks = [RankRecord() for _ in self._ranks]
        for event in sorted(events, key=lambda event: float(event["ts"])):
            _add(ranks[event["tid"]], event, origin)
        name = next((event["name"] for event in events if event["cat"] == "step"), f"step {number}")
        return RecordedStep(name, ranks)


def _add(rank: RankRecord, event: dict[str, Any], origin: float) -> None:
    start = (event["ts"] - origin) / 1000
    took = Interval(start, start + event["dur"] / 1000)
    said, category = event["args"], event["cat"]
    if category == "compute":
        rank.computes.append(Span(Action(said["stage"], _KINDS[said["kind"]], said["microbatch"]), *took))
    elif category in _WAITS:
        rank.waits.append(took)
        if category == "wait":
            rank.arrivals.append(Wait(said["kind"], said["other"], said["stage"], said["microbatch"], took))
    elif category in _STARTS:
        rank.starts.append(took)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from None
    found: Any = None
    try:
        found = json.loads(text)
    except ValueError:
        found = _what_is_whole(text)
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise ValueError(f"{path} is no Chrome trace: it must be a JSON array of events.")
    return found


def _what_is_whole(text: str) -> Any:
    """The events of a file that was cut off; they are an event a line."""
    lines = text.splitlines()
    events = []
    for line in lines[1:] if lines and lines[0].strip() == "[" else []:
        try:
            events.append(json.loads(line.strip().rstrip(",")))
        except ValueError:
            break
    return events or None


def _length(intervals: list[Interval], until: float) -> float:
    """How long at least one of them lasts, between 0 and ``until``."""
    total = covered = 0.0
    for start, end in sorted(intervals):
        start, end = max(start, covered), min(end, until)
        if end > start:
            total += end - start
            covered = end
    return total


def _ranges(numbers: list[int]) -> str:
    """``0 to 3, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)
