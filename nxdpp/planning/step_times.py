"""Times of a step: the schedule in simulated time, then optimizer and what replicas exchange."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nxdpp.planning.exchange_times import ExchangeTimes, Spans
from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.planning.machine import Link, Machine
from nxdpp.planning.stage_costs import Itemsizes, RankState, StageCosts
from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.execution import Times, run_in_order
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.placement import Placement


def pipeline_link(machine: Machine, layout: Layout, source: int, destination: int) -> Link:
    """Return the link between two pipeline ranks; ranks of one stage are neighbours (``parallel_state``)."""
    block = layout.data * layout.tensor
    hosts = {rank * block // machine.devices_per_host for rank in (source, destination)}
    inside = len(hosts) == 1 and block <= machine.devices_per_host
    link = machine.link if inside else machine.host_link
    return link.messages or link


# AdamW in torch reads and writes about this many tensors of the size of the parameters.
OPTIMIZER_PASSES = 20
# Kinds of actions that end the backward of a microbatch.
_LAST = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
_FORWARD = ActionKind.FORWARD


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank in a step.

    Attributes:
        compute: computations of the schedule, without collectives of the tensor group.
        tensor: collectives of the tensor group.
        bubble: waits of the schedule.
        exchange: of parameters and gradients of each microbatch that no computation hides: ZeRO-3.
        average: exchange of gradients and parameters once a step that no computation hides.
        optimizer: step of the optimizer.
    """

    compute: float
    tensor: float
    bubble: float
    exchange: float
    average: float
    optimizer: float

    @property
    def total(self) -> float:
        """All seconds."""
        return self.in_schedule + self.average + self.optimizer

    @property
    def in_schedule(self) -> float:
        """Seconds of the schedule."""
        return self.compute + self.tensor + self.bubble + self.exchange

    def beyond(self, fewer: "RankTimes", share: float) -> "RankTimes":
        """Return this + ``share`` * (this - ``fewer``) for what each microbatch adds."""
        return replace(
            self,
            compute=self.compute + share * (self.compute - fewer.compute),
            tensor=self.tensor + share * (self.tensor - fewer.tensor),
            exchange=self.exchange + share * (self.exchange - fewer.exchange),
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
    of_stages: Sequence[RankState],
    sizes: Itemsizes,
) -> list[RankTimes]:
    """Return the times of each pipeline rank.

    Args:
        machine: the machine.
        layout: the layout.
        microbatches: number of microbatches of a replica.
        stages: costs of each stage.
        states: state of each rank.
        of_stages: state of each stage.
        sizes: bytes of the numbers.
    """
    schedule = built(layout.schedule, layout.pipeline, microbatches, layout.chunks)
    placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
    exchanges = ExchangeTimes(machine, layout, sizes)
    split = is_split(schedule)
    alone = times_of(machine, layout, stages, placement, split)
    times = with_exchanges(alone, exchanges, layout, of_stages, split)
    extra = [_length(times, stage) - _length(alone, stage) for stage in range(len(stages))]
    ends, firsts, lasts, busy = _run(layout, schedule, times, microbatches)
    makespan = max(ends)
    delay = exchanges.gather_delay(firsts, of_stages)
    trained = {stage: float(state.gradients) for stage, state in enumerate(of_stages)}
    found = []
    for rank, end in enumerate(ends):
        tensor = microbatches * sum(stages[stage].tensor_seconds for stage in placement.stages_of(rank))
        exchange = microbatches * sum(extra[stage] for stage in placement.stages_of(rank))
        averaged = exchanges.reduced_end(lasts[rank], trained, end)
        optimizer = _optimizer_seconds(machine, layout, states[rank], sizes)
        average = max(averaged - makespan, 0.0) + exchanges.after_schedule(states[rank].gradients) + delay
        bubble = max(makespan - busy[rank], 0.0)
        found.append(RankTimes(busy[rank] - tensor - exchange, tensor, bubble, exchange, average, optimizer))
    return found


def _length(times: Times, stage: int) -> float:
    """Return the seconds of forward and backward of a stage."""
    return times.forward[stage] + times.input_gradient[stage] + times.weight_gradient[stage]


def _run(
    layout: Layout, schedule: Schedule, times: Times, microbatches: int
) -> tuple[list[float], list[Spans], list[Spans], list[float]]:
    """Run ``schedule`` in simulated time. Return end, first forwards, last backwards and busy seconds of each rank."""
    starts = run_in_order(schedule, len(times.forward), microbatches, times)
    lengths = times.lengths
    full = lengths[ActionKind.BACKWARD]
    ends, firsts, lasts, busy = [], [], [], []
    for actions, at in zip(schedule, starts, strict=True):
        first: Spans = {}
        for action, start in zip(actions, at, strict=True):
            if action.kind is _FORWARD and action.stage not in first:
                first[action.stage] = (start, start + times.forward[action.stage])
                if len(first) == layout.chunks:
                    break
        own: Spans = {}
        for action, start in zip(reversed(actions), reversed(at), strict=True):
            if action.kind in _LAST and action.stage not in own:
                own[action.stage] = (start, start + lengths[action.kind][action.stage])
                if len(own) == layout.chunks:
                    break
        last = actions[-1]
        ends.append(at[-1] + lengths[last.kind][last.stage])
        firsts.append(first)
        lasts.append(own)
        busy.append(microbatches * sum(times.forward[stage] + full[stage] for stage in own))
    return ends, firsts, lasts, busy


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


def with_exchanges(
    times: Times, exchanges: ExchangeTimes, layout: Layout, of_stages: Sequence[RankState], split: bool
) -> Times:
    """Return ``times`` with the exchanges of each microbatch: ZeRO-3 gathers for each action, and reduces gradients."""
    if layout.zero <= SHARDED:
        return times
    gathers = [exchanges.gather(state.weights) for state in of_stages]
    scatters = [exchanges.scatter(state.gradients) for state in of_stages]
    forward = [exchanges.longer(*each) for each in zip(times.forward, gathers, strict=True)]
    inputs, weights = [], []
    for own, later, gather, scatter in zip(times.input_gradient, times.weight_gradient, gathers, scatters, strict=True):
        if split:
            inputs.append(exchanges.longer(own, gather))
            weights.append(exchanges.longer(later, gather + scatter))
        else:
            inputs.append(exchanges.longer(own + later, gather + scatter) - later)
            weights.append(later)
    return times._replace(forward=forward, input_gradient=inputs, weight_gradient=weights)


def is_split(schedule: Schedule) -> bool:
    """Return whether a ``schedule`` has split backwards."""
    return split_share(schedule) > 0


def split_share(schedule: Schedule) -> float:
    """Return the share of the backwards of ``schedule`` that it splits."""
    kinds = Counter(action.kind for rank in schedule for action in rank)
    return kinds[ActionKind.INPUT_GRADIENT] / kinds[ActionKind.FORWARD]


def _optimizer_seconds(machine: Machine, layout: Layout, state: RankState, sizes: Itemsizes) -> float:
    stepped = float(state.gradients)
    if layout.zero:
        stepped *= sizes.to_master / layout.data
    return OPTIMIZER_PASSES * stepped / machine.device.memory_bandwidth
