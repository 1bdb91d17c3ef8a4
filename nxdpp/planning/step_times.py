"""Times of a step: the schedule in simulated time, then average, optimizer and what ZeRO-1 exchanges."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nxdpp.devices.collective_bytes import Kind, least_sent, least_steps
from nxdpp.planning.layer_times import BUCKET_BYTES
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import Link, Machine
from nxdpp.planning.stage_costs import RankState, StageCosts
from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.execution import Times, run_in_order
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.placement import Placement
from nxdpp.schedules.shared_execution import shared_run
from nxdpp.schedules.steady import steady_makespan


def pipeline_link(machine: Machine, layout: Layout, source: int, destination: int) -> Link:
    """Return the link between two pipeline ranks; ranks of one stage are neighbours (``parallel_state``)."""
    block = layout.data * layout.tensor
    hosts = {rank * block // machine.devices_per_host for rank in (source, destination)}
    inside = len(hosts) == 1 and block <= machine.devices_per_host
    link = machine.link if inside else machine.host_link
    return link.messages or link


def data_link(machine: Machine, layout: Layout) -> Link:
    """Return the slowest link of a data-parallel group."""
    return machine.link_of(layout.data, layout.tensor)


def exchange_seconds(kind: Kind, whole: float, ranks: int, link: Link) -> float:
    """Return the seconds of collectives over ``ranks`` ranks for ``whole`` bytes, in buckets."""
    if ranks == 1 or not whole:
        return 0.0
    steps = least_steps(kind, ranks) * math.ceil(whole / BUCKET_BYTES)
    return least_sent(kind, whole, ranks) / link.rate(kind) + steps * link.latency


# AdamW in torch reads and writes about this many tensors of the size of the parameters.
OPTIMIZER_PASSES = 20
_MASTER_BYTES = 4
# Kinds of actions that end the backward of a microbatch.
_LAST = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank in a step.

    Attributes:
        compute: computations of the schedule, without collectives of the tensor group.
        tensor: collectives of the tensor group.
        bubble: waits of the schedule.
        average: exchange of gradients, and of parameters with ZeRO-1, that no computation hides.
        optimizer: step of the optimizer.
    """

    compute: float
    tensor: float
    bubble: float
    average: float
    optimizer: float

    @property
    def total(self) -> float:
        """All seconds."""
        return self.compute + self.tensor + self.bubble + self.average + self.optimizer

    def of_whole(self, more: float, makespan: float) -> "RankTimes":
        """Return this for ``more`` times the microbatches, with the schedule's ``makespan`` for them."""
        compute, tensor = more * self.compute, more * self.tensor
        return replace(self, compute=compute, tensor=tensor, bubble=max(makespan - compute - tensor, 0.0))

    def beyond(self, fewer: "RankTimes", share: float) -> "RankTimes":
        """Return this + ``share`` * (this - ``fewer``) for what each microbatch adds."""
        return replace(
            self,
            compute=self.compute + share * (self.compute - fewer.compute),
            tensor=self.tensor + share * (self.tensor - fewer.tensor),
            bubble=max(self.bubble + share * (self.bubble - fewer.bubble), 0.0),
        )


@lru_cache(maxsize=64)
def built(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return the actions of a family, kept for the next layout that has the same ones."""
    return find_family(schedule).build(ranks, microbatches, chunks)


def step_times(
    machine: Machine,
    layout: Layout,
    microbatches: int,
    stages: Sequence[StageCosts],
    states: Sequence[RankState],
    gradients: Mapping[int, float],
    itemsize: int,
) -> list[RankTimes]:
    """Return the times of each pipeline rank.

    Args:
        machine: the machine.
        layout: the layout.
        microbatches: number of microbatches of a replica.
        stages: costs of each stage.
        states: state of each rank.
        gradients: bytes of the gradients of each stage.
        itemsize: bytes of a number of the parameters.
    """
    schedule = built(layout.schedule, layout.pipeline, microbatches, layout.chunks)
    placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
    times = times_of(machine, layout, stages, placement, _is_split(schedule))
    ends, lasts, busy = _run(machine, layout, schedule, times, microbatches)
    slowdown = 1.0 if machine.cores is None else max(machine.devices / machine.cores, 1.0)
    makespan = max(ends)
    found = []
    for rank, end in enumerate(ends):
        tensor = microbatches * sum(stages[stage].tensor_seconds for stage in placement.stages_of(rank))
        averaged = end + slowdown * (_average_end(machine, layout, lasts[rank], gradients, end) - end)
        optimizer = slowdown * _optimizer_seconds(machine, layout, states[rank], itemsize)
        exchange = slowdown * sharded_exchange(machine, layout, states[rank].gradients)
        unhidden = max(averaged - makespan, 0.0)
        bubble = max(makespan - busy[rank], 0.0)
        found.append(RankTimes(busy[rank] - tensor, tensor, bubble, unhidden + exchange, optimizer))
    return found


# Start and end of the last backward of each stage of a rank.
_Lasts = dict[int, tuple[float, float]]


def _run(
    machine: Machine, layout: Layout, schedule: Schedule, times: Times, microbatches: int
) -> tuple[list[float], list[_Lasts], list[float]]:
    """Run ``schedule`` in simulated time. Return end, last backwards and busy seconds of each rank."""
    if shares_cores(machine):
        assert machine.cores is not None
        spans = shared_run(schedule, times, machine.cores / (layout.tensor * layout.data)).spans
        shared_lasts: list[_Lasts] = [
            {each.action.stage: (each.start, each.end) for each in rank if each.action.kind in _LAST} for rank in spans
        ]
        return [rank[-1].end for rank in spans], shared_lasts, [sum(s.end - s.start for s in rank) for rank in spans]
    starts = run_in_order(schedule, len(times.forward), microbatches, times)
    lengths = times.lengths
    full = lengths[ActionKind.BACKWARD]
    ends, lasts, busy = [], [], []
    for actions, at in zip(schedule, starts, strict=True):
        own: _Lasts = {}
        for action, start in zip(reversed(actions), reversed(at), strict=True):
            if action.kind in _LAST and action.stage not in own:
                own[action.stage] = (start, start + lengths[action.kind][action.stage])
                if len(own) == layout.chunks:
                    break
        last = actions[-1]
        ends.append(at[-1] + lengths[last.kind][last.stage])
        lasts.append(own)
        busy.append(microbatches * sum(times.forward[stage] + full[stage] for stage in own))
    return ends, lasts, busy


def shares_cores(machine: Machine) -> bool:
    """Return whether several ranks share a processor core."""
    return machine.cores is not None and machine.devices > machine.cores


def whole_makespan(machine: Machine, layout: Layout, microbatches: int, stages: Sequence[StageCosts]) -> float:
    """Return the seconds of the schedule of many microbatches, where no ranks share a core."""
    family = find_family(layout.schedule)
    placement = family.placement(layout.pipeline, layout.chunks)
    split = _is_split(built(layout.schedule, layout.pipeline, 2 * layout.pipeline, layout.chunks))
    times = times_of(machine, layout, stages, placement, split)
    return steady_makespan(family, layout.pipeline, microbatches, layout.chunks, times)


def times_of(
    machine: Machine, layout: Layout, stages: Sequence[StageCosts], placement: Placement, split: bool
) -> Times:
    """Return the times of each stage for the simulation.

    With a ``split`` backward the first stage has no input-gradient: all of it waits for the weight-gradient.
    """
    transfer = []
    for stage, cost in enumerate(stages):
        following = min(stage + 1, len(stages) - 1)
        link = pipeline_link(machine, layout, placement.rank_of(stage), placement.rank_of(following))
        transfer.append(cost.sent / link.bytes_per_second + link.latency)
    inputs = [cost.input_gradient for cost in stages]
    weights = [cost.weight_gradient for cost in stages]
    if split:
        own = machine.device.action_seconds
        inputs[0], weights[0] = own, weights[0] + inputs[0] - own
        weights = [weight + own for weight in weights]
    return Times([cost.forward for cost in stages], inputs, weights, transfer)


def _is_split(schedule: Schedule) -> bool:
    return any(action.kind is ActionKind.INPUT_GRADIENT for action in schedule[0])


def _average_end(
    machine: Machine,
    layout: Layout,
    last: _Lasts,
    gradients: Mapping[int, float],
    end: float,
) -> float:
    """Return when the gradients of a rank are averaged.

    ``last`` has start and end of the last backward of each of its stages. Buckets are sent one after the other, the
    first ones during that backward.
    """
    if layout.data == 1 or layout.zero1:
        return end
    link = data_link(machine, layout)
    seconds = {stage: exchange_seconds("all_reduce", gradients[stage], layout.data, link) for stage in last}
    if machine.cores is not None:
        return end + sum(seconds.values())
    finished = 0.0
    for stage, (started, ended) in sorted(last.items(), key=lambda item: item[1][1]):
        # The bucket of the first layer is ready at the end.
        tail = exchange_seconds("all_reduce", min(gradients[stage], BUCKET_BYTES), layout.data, link)
        finished = max(max(finished, started) + seconds[stage], ended + tail)
    return max(finished, end)


def sharded_exchange(machine: Machine, layout: Layout, gradients: float) -> float:
    """Return the seconds in which ZeRO-1 exchanges ``gradients`` bytes of gradients, and as many of parameters."""
    if not layout.zero1:
        return 0.0
    link = data_link(machine, layout)
    scatter = exchange_seconds("reduce_scatter", gradients, layout.data, link)
    return scatter + exchange_seconds("all_gather", gradients, layout.data, link)


def _optimizer_seconds(machine: Machine, layout: Layout, state: RankState, itemsize: int) -> float:
    stepped = float(state.gradients)
    if layout.zero1:
        stepped *= max(_MASTER_BYTES / itemsize, 1.0) / layout.data
    return OPTIMIZER_PASSES * stepped / machine.device.memory_bandwidth
