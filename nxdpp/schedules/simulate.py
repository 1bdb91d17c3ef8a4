"""Simulation of a schedule: its times, bubbles and memory for given times of each stage.

An action starts as soon as the one before it on its rank has ended and its inputs have arrived. A transfer takes time,
but no time of a rank. Of an exchange with replicas a rank has the time that its computations do not hide.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nxdpp.counted import counted
from nxdpp.schedules.actions import BEGINS, COMPUTE, Action, ActionKind, Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.execution import ExchangeTimes, Times, run_in_order

_EXCHANGES = (*BEGINS, ActionKind.RESHARD, ActionKind.SUM_TIES, ActionKind.SUM_SEQUENCE)
# One for all stages, or one for each.
Time = float | Sequence[float]


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of a schedule in time.

    Attributes:
        spans: of each rank, in order.
        makespan: from the start of the first action to the end of the last one.
        bubbles: share of the makespan in which a rank computes nothing, for each rank.
        peaks: most microbatches that a rank holds, for each rank. A microbatch of one of v chunks counts 1/v, so that
            families can be compared (as in arXiv 2405.15362). It is held from its forward to the end of its
            backward or weight-gradient.
    """

    spans: list[list[Span]]
    makespan: float
    bubbles: list[float]
    peaks: list[float]

    @property
    def mean_bubble(self) -> float:
        """Mean bubble of the ranks."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(
    schedule: Schedule,
    forward: Time = 1.0,
    input_gradient: Time = 1.0,
    weight_gradient: Time = 1.0,
    transfer: Time = 0.0,
    exchange: Time = 0.0,
) -> Timeline:
    """Simulate ``schedule``.

    Args:
        schedule: compute actions of each rank, with or without the ones of participants (``lowering.additions.add``).
        forward: time of a forward of one microbatch, in any unit; one number, or one for each stage.
        input_gradient: time of an input-gradient.
        weight_gradient: time of a weight-gradient; a full backward takes both.
        transfer: time between the end of an action and the arrival of its result on another rank. In a list, item ``s``
            is between stage ``s`` and the next one, in either direction. The last item is not used.
        exchange: time of a gather, reduction or sum of a stage, under the compute action that it is around.

    Raises:
        ScheduleError: for a schedule that cannot run.
        ValueError: for negative or infinite times, or a list that does not have one for each stage.
    """
    sizes = check(schedule)
    exchanges = [ExchangeTimes(each) for each in _each("exchange", exchange, sizes.stages)]
    times = Times(
        _each("forward", forward, sizes.stages),
        _each("input_gradient", input_gradient, sizes.stages),
        _each("weight_gradient", weight_gradient, sizes.stages),
        _each("transfer", transfer, sizes.stages),
        dict.fromkeys(_EXCHANGES, exchanges),
    )
    run = run_in_order(schedule, sizes.stages, sizes.microbatches, times)
    spans = [list(map(Span, *each)) for each in zip(schedule, run.starts, run.ends, strict=True)]
    makespan = max(span.end for rank in spans for span in rank)
    computes = [[span for span in rank if span.action.kind in COMPUTE] for rank in spans]
    bubbles = [1 - sum(span.end - span.start for span in rank) / makespan if makespan else 0.0 for rank in computes]
    share = sizes.ranks / sizes.stages
    return Timeline(spans, makespan, bubbles, [peak * share for peak in in_flight_peaks(schedule)])


def in_flight_peaks(schedule: Schedule) -> list[int]:
    """Return for each rank the most (stage, microbatch) pairs between forward and end of the backward."""
    change = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1}
    return [max(accumulate((change.get(action.kind, 0) for action in actions), initial=0)) for actions in schedule]


def in_flight(schedule: Schedule) -> list[int]:
    """Return for each stage the most microbatches between their forward and the end of their backward.

    The stages of a rank may reach their peaks at different times.
    """
    of_stage: defaultdict[int, list[Action]] = defaultdict(list)
    for action in (action for actions in schedule for action in actions):
        of_stage[action.stage].append(action)
    return in_flight_peaks([of_stage[stage] for stage in range(len(of_stage))])


def _each(name: str, time: Time, stages: int) -> list[float]:
    times = [float(time)] * stages if isinstance(time, (int, float)) else [float(each) for each in time]
    if len(times) != stages:
        raise ValueError(
            f"{name} has {counted(len(times), 'time')} for {counted(stages, 'stage')}. Give one number, or one for "
            "each stage."
        )
    if bad := [each for each in times if not 0 <= each < float("inf")]:
        raise ValueError(f"{name}={bad[0]} must be a finite number of at least 0.")
    return times
