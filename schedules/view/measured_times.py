"""The times of each stage in a step that was run, to be put into the simulator."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.recorded import Interval, RecordedStep, Wait

_SENT_BY = {"F": (ActionKind.FORWARD,), "B": (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)}


@dataclass(frozen=True)
class MeasuredTimes:
    """Medians over the microbatches of a step, for each stage.

    A stage whose backward is whole has it in ``input_gradient``, and no weight-gradient. ``transfer`` is between a
    stage and the next one, either way.
    """

    forward: list[float]
    input_gradient: list[float]
    weight_gradient: list[float]
    transfer: list[float]

    def simulate(self, step: RecordedStep) -> Timeline:
        """The schedule of ``step`` on paper, with these times."""
        return simulate(step.schedule, self.forward, self.input_gradient, self.weight_gradient, self.transfer)


def measured_times(step: RecordedStep) -> MeasuredTimes:
    """The times in ``step``."""
    spans = [span for rank in step.ranks for span in rank.computes]
    stages = 1 + max(span.action.stage for span in spans)
    lengths: dict[tuple[int, ActionKind], list[float]] = {}
    for span in spans:
        lengths.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)

    def middle(stage: int, *kinds: ActionKind) -> float:
        return next((median(lengths[stage, kind]) for kind in kinds if (stage, kind) in lengths), 0.0)

    return MeasuredTimes(
        [middle(stage, ActionKind.FORWARD) for stage in range(stages)],
        [middle(stage, ActionKind.INPUT_GRADIENT, ActionKind.BACKWARD) for stage in range(stages)],
        [middle(stage, ActionKind.WEIGHT_GRADIENT) for stage in range(stages)],
        _transfers(step, stages),
    )


def _transfers(step: RecordedStep, stages: int) -> list[float]:
    """From the end of the action that made something to the end of the wait for it, between neighbours."""
    ends = {span.action: span.end for rank in step.ranks for span in rank.computes}
    found: list[list[tuple[float, Interval]]] = [[] for _ in range(stages)]
    for rank in step.ranks:
        for arrival in rank.arrivals:
            made = _made(arrival, ends)
            if made is not None and abs(arrival.maker - arrival.user) == 1:
                found[min(arrival.maker, arrival.user)].append((made, arrival.wait))
    return [_transfer(arrivals) for arrivals in found]


def _made(arrival: Wait, ends: dict[Action, float]) -> float | None:
    """When the action was over whose result arrived."""
    for kind in _SENT_BY.get(arrival.kind, ()):
        if (made := ends.get(Action(arrival.maker, kind, arrival.microbatch))) is not None:
            return made
    return None


def _transfer(arrivals: Iterable[tuple[float, Interval]]) -> float:
    """The median of what was waited for from before it was made.

    What was made before is known only to have taken no longer than until it was asked for: without any other, the
    shortest of those times.
    """
    seen = [wait.end - made for made, wait in arrivals if wait.start <= made]
    at_most = [wait.end - made for made, wait in arrivals]
    return max(0.0, median(seen) if seen else min(at_most, default=0.0))
