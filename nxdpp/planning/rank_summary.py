"""Memory and work of each rank of a pipeline, from the summaries of its stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from nxdpp.pipeline.partition.layer_costs import StateBytes
from nxdpp.planning.dimensions import WholeBytes, planned_state
from nxdpp.planning.layout import Dimensions
from nxdpp.planning.stage_summary import StageSummary
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.memory import peak_bytes
from nxdpp.schedules.simulate import simulate

# Forward, input-gradient and weight-gradient of a stage take a third of its work each.
_KINDS = 3


@dataclass(frozen=True)
class RankSummary:
    """Cost of one rank of a pipeline.

    Attributes:
        stages: numbers of its stages.
        layers: number of its transformer layers.
        state: bytes of its parameters, gradients and optimizer state. A parameter of several stages counts once.
        work: forward and backward of one microbatch.
        peak_activations: the most bytes that its stages hold at once, in the order of the schedule's actions.
        in_flight: the most microbatches that it holds, a microbatch of one of its stages being a part of one.
        transport: bytes of communicators and messages.
        estimated: True if some costs are estimated.
    """

    stages: list[int]
    layers: int
    state: StateBytes
    work: float
    peak_activations: int
    in_flight: float
    transport: int
    estimated: bool

    @property
    def memory(self) -> int:
        """All bytes at the peak."""
        return self.state.total + self.peak_activations + self.transport


@dataclass(frozen=True)
class LayoutSummary:
    """Ranks and stages of a layout.

    Attributes:
        ranks, stages: summaries.
        bubble: mean share of a step in which ranks wait, for the work of these stages. Transfers take no time.
        equal_bubble: the bubble of equal stages.
    """

    ranks: list[RankSummary]
    stages: list[StageSummary]
    bubble: float
    equal_bubble: float

    @property
    def slowest(self) -> int:
        """The rank with the most work."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].work)

    @property
    def fullest(self) -> int:
        """The rank that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].memory)

    @property
    def imbalance(self) -> float:
        """Work of the slowest rank over the mean of all ranks."""
        return self.ranks[self.slowest].work * len(self.ranks) / sum(rank.work for rank in self.ranks)


def summarise_layout(stages: list[StageSummary], schedule: ChosenSchedule, sizes: Dimensions) -> LayoutSummary:
    """Return the ranks of ``stages`` under ``schedule``, with its bubble."""
    peaks = peak_bytes(schedule.training, [stage.activations for stage in stages], [stage.kept for stage in stages])
    share = len(stages) / schedule.ranks
    equal = simulate(schedule.training)
    times = [stage.work / _KINDS for stage in stages]
    own = simulate(schedule.training, times, times, times)
    ranks = []
    for rank in range(schedule.ranks):
        held = [number for number, stage in enumerate(stages) if stage.rank == rank]
        here = [stages[number] for number in held]
        ranks.append(
            RankSummary(
                stages=held,
                layers=sum(len(stage.layers) for stage in here),
                state=_state(here, sizes),
                work=sum(stage.work for stage in here),
                peak_activations=round(peaks[rank]),
                in_flight=equal.peaks[rank] * share / len(held),
                transport=here[0].transport,
                estimated=any(stage.estimated for stage in here),
            )
        )
    return LayoutSummary(ranks, stages, own.mean_bubble, equal.mean_bubble)


def _state(stages: Sequence[StageSummary], sizes: Dimensions) -> StateBytes:
    parameters = (parameter for stage in stages for parameter in stage.parameters)
    # One stage computes at a time.
    weights = max(stage.at_once.weights for stage in stages)
    gradients = max(stage.at_once.gradients for stage in stages)
    return planned_state(parameters, WholeBytes(weights, gradients), sizes)
