"""Times of a step: the schedule with its exchanges in simulated time, then the optimizer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.planning.machine import Machine
from nxdpp.planning.replica_collectives import ReplicaCollectives
from nxdpp.planning.stage_costs import Itemsizes, RankState, StageCosts
from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.execution import Times, run_in_order
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.lowering.additions import OF_ZERO, TOKENS, add
from nxdpp.schedules.placement import Placement

# AdamW in torch reads and writes about this many tensors of the size of the parameters.
OPTIMIZER_PASSES = 20


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank in a step.

    Attributes:
        compute: computations of the schedule, without collectives of the tensor group.
        tensor: collectives of the tensor group.
        tokens: messages of tokens of experts that no computation hides.
        bubble: waits of the schedule.
        exchange: of parameters and gradients of each microbatch that no computation hides: ZeRO-3.
        average: exchange of gradients and parameters once a step that no computation hides.
        optimizer: step of the optimizer.
    """

    compute: float
    tensor: float
    tokens: float
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
        return self.compute + self.tensor + self.tokens + self.bubble + self.exchange

    def beyond(self, fewer: "RankTimes", share: float) -> "RankTimes":
        """Return this + ``share`` * (this - ``fewer``) for what each microbatch adds."""
        return replace(
            self,
            compute=self.compute + share * (self.compute - fewer.compute),
            tensor=self.tensor + share * (self.tensor - fewer.tensor),
            tokens=self.tokens + share * (self.tokens - fewer.tokens),
            exchange=self.exchange + share * (self.exchange - fewer.exchange),
            bubble=max(self.bubble + share * (self.bubble - fewer.bubble), 0.0),
        )


@lru_cache(maxsize=64)
def built(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return the actions of a family, kept for the next layout that has the same ones."""
    return find_family(schedule).build(ranks, microbatches, chunks)


@lru_cache(maxsize=64)
def _with_exchanges(schedule: str, ranks: int, microbatches: int, chunks: int, zero: int, tokens: bool) -> Schedule:
    """Return them with the actions of what replicas exchange."""
    additions = (*(TOKENS if tokens and find_family(schedule).overlaps else ()), *OF_ZERO[zero])
    return [add(actions, additions) for actions in built(schedule, ranks, microbatches, chunks)]


@lru_cache(maxsize=64)
def _counts(schedule: str, ranks: int, microbatches: int, chunks: int) -> list[dict[tuple[int, ActionKind], int]]:
    """Return the number of actions of each stage and kind, for each rank."""
    return [Counter(map(itemgetter(0, 1), actions)) for actions in built(schedule, ranks, microbatches, chunks)]


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
    key = layout.schedule, layout.pipeline, microbatches, layout.chunks
    counts, exchanges = _counts(*key), ReplicaCollectives(machine, layout, sizes)
    placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
    alone = times_of(machine, layout, stages, placement, split_share(*key) > 0)
    times = alone._replace(exchanges=exchanges.of_stages(of_stages), hides=exchanges.hides)
    if layout.zero > SHARDED:
        schedule, times = built(*key), times.around_each()
    else:
        schedule = _with_exchanges(*key, layout.zero if layout.data > 1 else 1, layout.experts > 1)
    run = run_in_order(schedule, len(stages), microbatches, times)
    makespan, lengths = max(run.clocks), (alone.lengths, times.lengths)
    found = []
    for rank, exposed in enumerate(run.exposed):
        tensor = microbatches * sum(stages[stage].tensor_seconds for stage in placement.stages_of(rank))
        busy, longer = (
            sum(number * each[kind][stage] for (stage, kind), number in counts[rank].items()) for each in lengths
        )
        tokens = microbatches * sum(stages[stage].exchange_seconds for stage in placement.stages_of(rank))
        hidden = run.hidden[rank]
        once = exposed + max(run.links[rank] - makespan, 0.0) + exchanges.after_schedule(states[rank])
        optimizer = _optimizer_seconds(machine, layout, states[rank], sizes)
        bubble = max(makespan - (longer - hidden) - exposed, 0.0)
        computed = busy - tensor - tokens
        found.append(RankTimes(computed, tensor, tokens - hidden, bubble, longer - busy, once, optimizer))
    return found


def times_of(
    machine: Machine, layout: Layout, stages: Sequence[StageCosts], placement: Placement, split: bool
) -> Times:
    """Return the times of each stage for the simulation.

    With a ``split`` backward the first stage has no input-gradient: all of it waits for the weight-gradient.
    """
    transfer = []
    # Ranks of one stage are neighbours (``parallel_state``).
    block = layout.data * layout.tensor
    for stage, cost in enumerate(stages):
        ends = (placement.rank_of(each) for each in (stage, min(stage + 1, len(stages) - 1)))
        inside = len({rank * block // machine.devices_per_host for rank in ends}) == 1
        link = machine.link if inside and block <= machine.devices_per_host else machine.host_link
        link = link.messages or link
        transfer.append(cost.sent / link.bytes_per_second + link.latency)
    inputs = [cost.input_gradient for cost in stages]
    weights = [cost.weight_gradient for cost in stages]
    if split:
        own = machine.device.action_seconds
        inputs[0], weights[0] = own, weights[0] + inputs[0] - own
        weights = [weight + own for weight in weights]
    forwards = [cost.forward for cost in stages]
    each = zip(stages, forwards, inputs, weights, strict=True)
    turns = [(cost.turns(forward), cost.turns(i + w)) for cost, forward, i, w in each]
    tokens = [before for before, _ in turns], [after for _, after in turns]
    return Times(forwards, inputs, weights, transfer, tokens=tokens)


def split_share(schedule: str, ranks: int, microbatches: int, chunks: int) -> float:
    """Return the share of the backwards of a family that it splits."""
    kinds: Counter[ActionKind] = Counter()
    for rank in _counts(schedule, ranks, microbatches, chunks):
        for (_, kind), number in rank.items():
            kinds[kind] += number
    return kinds[ActionKind.INPUT_GRADIENT] / kinds[ActionKind.FORWARD]


def _optimizer_seconds(machine: Machine, layout: Layout, state: RankState, sizes: Itemsizes) -> float:
    stepped = float(state.gradients)
    if layout.zero:
        stepped = state.part("gradients", layout) * sizes.to_master
    return OPTIMIZER_PASSES * stepped / machine.device.memory_bandwidth
