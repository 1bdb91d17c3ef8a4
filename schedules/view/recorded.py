"""Recorded steps of a timeline file, and the times of their stages.

Times are milliseconds. A step begins with its first compute action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.check import ScheduleError, check
from nxdpp.schedules.execution import Times
from nxdpp.schedules.simulate import Span, Timeline, timeline_of
from nxdpp.schedules.timeline_file import Activity, Event, read_timeline

_WAITS = (Activity.WAIT, Activity.WAIT_SENT, Activity.WAIT_METADATA)
_STARTS = (Activity.SEND, Activity.RECEIVE)
# The actions whose results are sent as activations and as gradients.
_MADE_BY = {"F": (ActionKind.FORWARD,), "B": (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)}


@dataclass(frozen=True)
class RecordedStep:
    """A complete step; ``name`` tells its number and kind, ``ranks`` has the events of each rank."""

    name: str
    ranks: Sequence[Sequence[Event]]

    @cached_property
    def timeline(self) -> Timeline:
        """The compute actions of each rank at their recorded times."""
        return timeline_of([[_span(e) for e in events if e.activity is Activity.COMPUTE] for events in self.ranks])

    @property
    def schedule(self) -> Schedule:
        """The compute actions of each rank, in the order in which they ran."""
        return [[span.action for span in spans] for spans in self.timeline.spans]

    def waited(self, rank: int) -> float:
        """Time that ``rank`` waited for others, until the last compute action of all ranks ends."""
        return self._covered(rank, _WAITS)

    def started(self, rank: int) -> float:
        """Time that ``rank`` spent in calls that start sends and receives, without waits, until the same moment."""
        return self._covered(rank, _WAITS + _STARTS) - self._covered(rank, _WAITS)

    def intervals(self, rank: int, *, of_waits: bool) -> list[tuple[float, float]]:
        """Start and end of each wait of ``rank``, or of each call that starts a transfer, until the same moment."""
        activities, end = _WAITS if of_waits else _STARTS, self.timeline.makespan
        found = (_interval(event) for event in self.ranks[rank] if event.activity in activities)
        return [(max(0.0, first), min(last, end)) for first, last in found if last > 0 and first < end]

    def measured_times(self) -> Times:
        """Medians over the microbatches for each stage, as input of the simulator.

        A full backward counts as input-gradient where a stage has no other. A transfer is between a stage and the next
        one, in either direction.
        """
        lengths: dict[tuple[int, ActionKind], list[float]] = {}
        for span in (span for spans in self.timeline.spans for span in spans):
            lengths.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)
        stages = range(1 + max(stage for stage, _ in lengths))

        def middle(stage: int, *kinds: ActionKind) -> float:
            return next((median(lengths[stage, kind]) for kind in kinds if (stage, kind) in lengths), 0.0)

        return Times(
            [middle(stage, ActionKind.FORWARD) for stage in stages],
            [middle(stage, ActionKind.INPUT_GRADIENT, ActionKind.BACKWARD) for stage in stages],
            [middle(stage, ActionKind.WEIGHT_GRADIENT) for stage in stages],
            [self._transfer({stage, stage + 1}) for stage in stages],
        )

    def _transfer(self, stages: set[int]) -> float:
        """Median time from the end of an action to the end of the wait for its result, between two stages.

        A wait that began after the action ended only gives an upper bound. Without other waits, the lowest counts.
        """
        ends = {span.action: span.end for spans in self.timeline.spans for span in spans}
        known: list[float] = []
        bounds: list[float] = []
        for event in (event for events in self.ranks for event in events):
            if event.activity is Activity.WAIT and event.other is not None and {event.stage, event.other} == stages:
                actions = [Action(event.other, kind, event.microbatch or 0) for kind in _MADE_BY.get(event.kind, ())]
                start, end = _interval(event)
                for made in (ends[action] for action in actions if action in ends):
                    (known if start <= made else bounds).append(end - made)
        return max(0.0, median(known) if known else min(bounds, default=0.0))

    def _covered(self, rank: int, activities: Sequence[Activity]) -> float:
        """Time covered by events of the ``activities``, from 0 to the makespan."""
        total = covered = 0.0
        for start, end in sorted(_interval(event) for event in self.ranks[rank] if event.activity in activities):
            start, end = max(start, covered), min(end, self.timeline.makespan)
            if end > start:
                total += end - start
                covered = end
        return total


class RecordedTimeline:
    """The steps in a timeline file; ``ValueError`` for a file that cannot be read or is no timeline."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = read_timeline(path)
        self.complete = [number for number in sorted(self._file.steps) if self._is_complete(number)]

    def step(self, number: int | None = None) -> RecordedStep:
        """A step by its number, by default the last complete one that trained; of evaluations alone the last one.

        Raises ``ValueError`` for a step that is not complete.
        """
        if not self.complete:
            raise ValueError(f"{self._path} has no whole step: the run ended before its first step did.")
        if number is None:
            trained = (each for each in reversed(self.complete) if self._has_backward(each))
            number = next(trained, self.complete[-1])
        elif number not in self.complete:
            what = "was cut short" if number in self._file.steps else "is not there"
            raise ValueError(f"step {number} {what} in {self._path}; whole steps: {_ranges(self.complete)}.")
        return self._build(number)

    def describe(self) -> str:
        """The numbers of the steps in words."""
        cut = sorted(self._file.steps.keys() - set(self.complete))
        return f"steps {_ranges(self.complete)}" + (f"; cut short: {_ranges(cut)}" if cut else "")

    def _has_backward(self, number: int) -> bool:
        events = (event for of_rank in self._file.steps[number].values() for event in of_rank)
        return any(event.activity is Activity.COMPUTE and event.kind != ActionKind.FORWARD.value for event in events)

    def _is_complete(self, number: int) -> bool:
        """Return whether all ranks wrote the step and their actions form a schedule."""
        if len(self._file.steps[number]) < self._file.ranks:
            return False
        try:
            check(self._build(number).schedule)
        except ScheduleError:
            return False
        return True

    def _build(self, number: int) -> RecordedStep:
        ranks = [self._file.steps[number][rank] for rank in range(self._file.ranks)]
        origin = min((e.start for events in ranks for e in events if e.activity is Activity.COMPUTE), default=0)
        shifted = [[e._replace(start=e.start - origin, end=e.end - origin) for e in events] for events in ranks]
        return RecordedStep(self._file.names[number], shifted)


def _interval(event: Event) -> tuple[float, float]:
    """Start and end of ``event`` in milliseconds."""
    return event.start / 1e6, event.end / 1e6


def _span(event: Event) -> Span:
    assert event.microbatch is not None, "read_timeline checks compute actions"
    return Span(Action(event.stage, ActionKind(event.kind), event.microbatch), *_interval(event))


def _ranges(numbers: list[int]) -> str:
    """``0 to 3, 5``."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(firsts, lasts, strict=True)
    return ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in pairs)
