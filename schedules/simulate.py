"""How long a schedule takes, and what it holds, for given times of each stage.

Every action starts as soon as its rank is done with the one before and what it needs has come; transfers cost time,
and nobody's attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.execution import Times, run_in_order

# One for all stages, or one for each.
Time = float | Sequence[float]


@dataclass(frozen=True)
class Span:
    """An action and when it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What became of a schedule.

    Attributes:
        spans: of each rank, in order.
        makespan: from the start of the first action to the end of the last one.
        bubbles: the share of the makespan in which each rank computes nothing.
        peaks: how many microbatches each rank holds at most. One counts for the share of the model that a rank has
            on average, so that families with different numbers of chunks can be compared (as in arXiv 2405.15362): a
            chunk counts 1/v. It is held from its forward to the end of its backward, or of its weight-gradient
            where that is apart.
    """

    spans: list[list[Span]]
    makespan: float
    bubbles: list[float]
    peaks: list[float]

    @property
    def mean_bubble(self) -> float:
        """The share of the makespan in which a rank computes nothing, on average."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(
    schedule: Schedule,
    forward: Time = 1.0,
    input_gradient: Time = 1.0,
    weight_gradient: Time = 1.0,
    transfer: Time = 0.0,
) -> Timeline:
    """Run ``schedule`` on paper.

    Args:
        schedule: compute actions of each rank.
        forward: time of a stage's forward of a microbatch, in any unit; one for all stages or a list of each.
        input_gradient: of its input-gradient.
        weight_gradient: of its weight-gradient; a full backward takes both.
        transfer: time from the end of an action until the next stage on another rank can use what it made. In a list,
            that between stage ``s`` and the next, either way, is the ``s``-th; the last one is not used.

    Raises:
        ScheduleError: for a schedule that cannot run.
        ValueError: for times that cannot be, or not as many as stages.
    """
    sizes = check(schedule)
    times = Times(
        _each("forward", forward, sizes.stages),
        _each("input_gradient", input_gradient, sizes.stages),
        _each("weight_gradient", weight_gradient, sizes.stages),
        _each("transfer", transfer, sizes.stages),
    )
    starts = run_in_order(schedule, sizes.stages, sizes.microbatches, times)
    lasts = {
        ActionKind.FORWARD: times.forward,
        ActionKind.BACKWARD: [i + w for i, w in zip(times.input_gradient, times.weight_gradient, strict=True)],
        ActionKind.INPUT_GRADIENT: times.input_gradient,
        ActionKind.WEIGHT_GRADIENT: times.weight_gradient,
    }
    spans = [
        [Span(a, start, start + lasts[a.kind][a.stage]) for a, start in zip(actions, at, strict=True)]
        for actions, at in zip(schedule, starts, strict=True)
    ]
    return timeline_of(spans)


def timeline_of(spans: list[list[Span]]) -> Timeline:
    """What ``spans`` of each rank, the first of all starting at 0, come to."""
    schedule = [[span.action for span in rank] for rank in spans]
    makespan = max(span.end for rank in spans for span in rank)
    bubbles = [1 - sum(span.end - span.start for span in rank) / makespan if makespan else 0.0 for rank in spans]
    share = len(schedule) / len({action.stage for actions in schedule for action in actions})
    return Timeline(spans, makespan, bubbles, [peak * share for peak in live_peaks(schedule)])


def live_peaks(schedule: Schedule) -> list[int]:
    """For each rank, how many (stage, microbatch) pairs are between their forward and the end of their backward."""
    peaks = []
    for actions in schedule:
        live = peak = 0
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                live += 1
                peak = max(peak, live)
            elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
                live -= 1
        peaks.append(peak)
    return peaks


def _each(name: str, time: Time, stages: int) -> list[float]:
    times = [float(time)] * stages if isinstance(time, (int, float)) else [float(each) for each in time]
    if len(times) != stages:
        raise ValueError(f"{name} has {len(times)} times for {stages} stages. Give one number, or one for each stage.")
    if bad := [each for each in times if not 0 <= each < float("inf")]:
        raise ValueError(f"{name}={bad[0]} is no time: give a number that is not negative.")
    return times
