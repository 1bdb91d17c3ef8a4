"""Prediction of a layout: seconds of a step, memory of each rank, bubble and bytes, and the part that limits it."""

from collections.abc import Sequence
from dataclasses import dataclass

from nxdpp.counted import counted
from nxdpp.devices.kinds import has_streams
from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.rank_memory import RankMemory, activation_peak, rank_memory, stage_bytes
from nxdpp.planning.replica_collectives import ReplicaCollectives
from nxdpp.planning.stage_costs import RankState, StageCosts, largest_sent, rank_state, stage_costs, stage_ends
from nxdpp.planning.step_times import RankTimes, built, split_share, step_times
from nxdpp.schedules.families.registry import find_family


@dataclass(frozen=True)
class LinkBytes:
    """Least bytes that a rank sends in a step.

    Attributes:
        tensor: in its tensor group.
        pipeline: to the stages before and behind.
        data: to other replicas, with tokens of experts.
    """

    tensor: float
    pipeline: float
    data: float


@dataclass(frozen=True)
class Prediction:
    """Figures of a layout.

    Attributes:
        layout: the layout.
        cuts: names of the layers after which the model is cut.
        microbatches: number of microbatches of a replica in a step.
        times: of each pipeline rank.
        memory: of each pipeline rank.
        sent: bytes of a step, of each pipeline rank.
        estimated: True if costs of some layers are estimated from their parameters.
    """

    layout: Layout
    cuts: list[str]
    microbatches: int
    times: list[RankTimes]
    memory: list[RankMemory]
    sent: list[LinkBytes]
    estimated: bool = False

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, with the optimizer."""
        return max(rank.total for rank in self.times)

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the rank that needs the most."""
        return max(rank.total for rank in self.memory)

    @property
    def most_sent(self) -> LinkBytes:
        """Bytes of a step, for each link those of the rank that sends the most over it."""
        names = ("tensor", "pipeline", "data")
        return LinkBytes(**{name: max(getattr(rank, name) for rank in self.sent) for name in names})

    @property
    def bubble(self) -> float:
        """Share of the schedule's time in which ranks wait, the mean of all ranks."""
        shares = [rank.bubble / rank.in_schedule for rank in self.times]
        return sum(shares) / len(shares)

    @property
    def limited_by(self) -> str:
        """The largest parts of the slowest rank's step, with their shares."""
        number = max(range(len(self.times)), key=lambda rank: self.times[rank].compute)
        slowest = self.times[number]
        parts = {
            f"compute of rank {number}" if len(self.times) > 1 else "compute": slowest.compute,
            "tensor collectives": slowest.tensor,
            "tokens of experts": slowest.tokens,
            "waits": slowest.bubble,
            f"ZeRO-{self.layout.zero} exchange" if self.layout.zero else "average": slowest.exchange + slowest.average,
            "optimizer": slowest.optimizer,
        }
        shares = sorted(((seconds / slowest.total, name) for name, seconds in parts.items()), reverse=True)
        return ", ".join(f"{name} {share:.0%}" for share, name in shares[:2] if share >= 0.01)


class TooLargeError(RuntimeError):
    """A layout that does not fit into the memory; the argument is the bytes that it needs."""


def predict(
    costs: ModelCosts,
    layout: Layout,
    ends: Sequence[int] | None = None,
    shorten: bool = True,
    limit: float | None = None,
) -> Prediction:
    """Predict ``layout`` on the machine, and for the job, of ``costs``.

    Args:
        costs: costs of the model.
        layout: the layout.
        ends: number of layers up to the end of each stage. By default chosen for the least work of the slowest stage.
        shorten: simulate few microbatches and extend the times: once each rank repeats
            its steady actions, they are affine in the number of microbatches.
        limit: bytes of a device. By default the memory does not matter.

    Raises:
        ValueError: for a layout that does not fit the model, the batch or the devices.
        TooLargeError: for one that needs more memory than ``limit``.
    """
    machine = costs.machine
    if layout.devices != machine.devices:
        raise ValueError(
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} are "
            f"{counted(layout.devices, 'device')}, and the machine has {machine.devices}."
        )
    layout.check()
    costs.check_experts(layout.experts)
    microbatches = layout.microbatches(costs.job.global_batch)
    model = costs.of(layout.tensor, layout.sequence, layout.microbatch, layout.experts)
    ends = list(ends) if ends is not None else stage_ends(model, layout.stages, layout.checkpoint)
    stages = stage_costs(model, ends, layout.checkpoint, machine.device.action_seconds)
    states, of_stages = states_of(costs, layout, stages)
    sizes, kind, message = costs.itemsizes, machine.device.kind, largest_sent(stages)
    placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
    of_stage = [stage_bytes(layout, state, sizes, has_streams(kind)) for state in of_stages]

    def times_of(count: int) -> list[RankTimes]:
        return step_times(machine, layout, count, stages, states, of_stages, sizes)

    def peaks_of(count: int) -> list[float]:
        """The peak of each rank's activations and temporary tensors, beyond its lasting gradients."""
        schedule = built(layout.schedule, layout.pipeline, count, layout.chunks)
        parts = [{stage: of_stage[stage] for stage in placement.stages_of(rank)} for rank in range(layout.pipeline)]
        return [activation_peak(actions, stages, part) for actions, part in zip(schedule, parts, strict=True)]

    few, more = _simulated_counts(layout, microbatches) if shorten else (microbatches, microbatches)
    share = 0.0 if more == microbatches else (microbatches - more) / (more - few)
    # Memory.
    peaks = peaks_of(more)
    if share:
        peaks = [a + share * (a - b) for a, b in zip(peaks, peaks_of(few), strict=True)]
    memory = [
        rank_memory(layout, state, peak + (0 if layout.zero > SHARDED else state.cast), kind, sizes, message)
        for state, peak in zip(states, peaks, strict=True)
    ]
    if limit is not None and max(rank.total for rank in memory) > limit:
        raise TooLargeError(max(rank.total for rank in memory))
    # Times.
    times = times_of(more)
    if share:
        times = [a.beyond(b, share) for a, b in zip(times, times_of(few), strict=True)]
    cuts = [model.layers[end - 1].layer for end in ends[:-1]]
    sent = _sent(ReplicaCollectives(machine, layout, sizes), layout, microbatches, stages, states)
    return Prediction(layout, cuts, microbatches, times, memory, sent, model.estimated)


def _simulated_counts(layout: Layout, microbatches: int) -> tuple[int, int]:
    """Return two numbers of microbatches that differ by a group of them; the second is ``microbatches`` if few."""
    ranks = layout.pipeline
    more = 6 * ranks + microbatches % ranks
    return (more - ranks, more) if more < microbatches else (microbatches, microbatches)


def states_of(
    costs: ModelCosts, layout: Layout, stages: Sequence[StageCosts]
) -> tuple[list[RankState], list[RankState]]:
    """Return the state of each pipeline rank, and of each stage."""
    placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
    ends = tuple(stage.end for stage in stages)
    key = (layout.tensor, layout.sequence, layout.experts, placement, ends)
    if key not in costs.states:
        # State does not depend on the microbatch.
        model = costs.of(layout.tensor, layout.sequence, 1, layout.experts)
        states = [
            rank_state(model, [stages[each] for each in placement.stages_of(rank)]) for rank in range(layout.pipeline)
        ]
        costs.states[key] = states, [rank_state(model, [stage]) for stage in stages]
    found: tuple[list[RankState], list[RankState]] = costs.states[key]
    return found


def _sent(
    exchanges: ReplicaCollectives,
    layout: Layout,
    microbatches: int,
    stages: Sequence[StageCosts],
    states: Sequence[RankState],
) -> list[LinkBytes]:
    placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
    share = split_share(layout.schedule, layout.pipeline, 2 * layout.pipeline, layout.chunks)
    found = []
    for rank, state in enumerate(states):
        own = placement.stages_of(rank)
        tensor = microbatches * sum(stages[stage].tensor_bytes for stage in own)
        # Activations go to the next stage, gradients as large as the activations to the one before.
        messages = 0.0
        for stage in own:
            if stage + 1 < len(stages) and placement.rank_of(stage + 1) != rank:
                messages += stages[stage].sent
            if stage and placement.rank_of(stage - 1) != rank:
                messages += stages[stage - 1].sent
        tokens = microbatches * (1 - 1 / layout.experts) * sum(stages[stage].tokens for stage in own)
        data = exchanges.sent(state, microbatches, share) + tokens
        found.append(LinkBytes(tensor, microbatches * messages, data))
    return found
