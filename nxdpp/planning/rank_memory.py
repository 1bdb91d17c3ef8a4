"""Peak memory of a rank: state, activations in flight, the operation that runs, buckets and messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxdpp.devices.kinds import has_streams
from nxdpp.pipeline.partition.balanced_partition import COMMUNICATOR_BYTES, MESSAGES_HELD
from nxdpp.planning.layer_times import BUCKET_BYTES
from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.planning.stage_costs import Itemsizes, RankState, StageCosts
from nxdpp.ranks.host_link import slots_of
from nxdpp.ranks.transfer_groups import communicators
from nxdpp.schedules.actions import Action, ActionKind

# Copies of gradients that the average sends during backwards take at most this much, and a bucket.
_COPIED_BYTES = 256 * 2**20
# A sum of ZeRO-1 has two buckets in flight.
_BUCKETS = 2
# Messages of ``fully_shard`` that exist at once: of the unit that runs, and of the next one.
_MESSAGES = 2
_MOMENTS = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank at its peak, by part.

    Attributes:
        weights, gradients, optimizer: state, between steps. With ZeRO-2 and 3 its shards.
        activations: of microbatches in flight, with the temporary tensors of the operation that runs, the weights that
            autocast has converted, and with ZeRO-2 and 3 gathered weights and whole gradients; beyond ``gradients``.
        step: temporary tensors of the optimizer's step, which has no activations.
        buckets: flat copies of gradients that stay from step to step.
        transport: communicators and messages; on CPUs the slots of shared memory.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    step: float
    buckets: float
    transport: float

    @property
    def total(self) -> float:
        """All bytes at the peak."""
        at_peak = max(self.activations, self.step)
        return self.weights + self.gradients + self.optimizer + at_peak + self.buckets + self.transport


@dataclass(frozen=True)
class StageBytes:
    """Bytes of weights and gradients of a stage that come and go in a step.

    Attributes:
        gradients: of the gradients that stay to the end of the step and have no memory before. They come with the first
            backward; with ZeRO-2 with the last one, in the place of the whole gradients.
        gathered: of weights, from the first forward to the last backward: ZeRO-2.
        whole: of gradients, from the end of the first backward to the last one: ZeRO-2.
        forward, backward, weight: of gathered units and of their gradients, while a forward or input-gradient, a
            backward, or a weight-gradient runs.
        last: of what the last backward has besides.
        held: of weights that autocast has converted for a microbatch, from its forward to its backward: ZeRO-3.
        reduces_each: a weight-gradient reduces whole gradients, also what the input-gradients before it made: ZeRO-3.
    """

    gradients: float
    gathered: float = 0.0
    whole: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    last: float = 0.0
    held: float = 0.0
    reduces_each: bool = False


def stage_bytes(layout: Layout, state: RankState, sizes: Itemsizes, on_cuda: bool) -> StageBytes:
    """Return the bytes of a stage with ``state``.

    On CUDA the stream of reductions has memory of its own, which stays: the shards of gradients have it before they
    come.
    """
    gradients = _lasting(layout, state, sizes)
    if not layout.is_sharded:
        return StageBytes(gradients)
    shard = 0.0 if on_cuda else gradients
    # Gradients of units in the parameters' dtype, and the largest flat in the dtype of the reduction.
    unit, rest = min(state.unit, state.gradients), min(state.rest, state.gradients)
    flat = max(unit, rest) * sizes.to_gradient
    if layout.zero > SHARDED:
        # The rest of a stage is gathered during all of an action, and all of it during a weight-gradient.
        gathered = min(state.rest + _MESSAGES * state.unit, state.weights)
        # gloo reduces a copy, while the next layer is recomputed.
        reduced = 2 * flat if layout.checkpoint and not on_cuda else flat
        backward = gathered + min(rest + unit, state.gradients) + reduced
        # Recomputed layers convert their weights again.
        held = state.cast * (state.rest / max(state.weights, 1) if layout.checkpoint else 1.0)
        weight = state.weights + flat
        return StageBytes(shard, forward=gathered, backward=backward, weight=weight, held=held, reduces_each=True)
    whole, made = state.gradients * sizes.to_gradient, min(state.largest, state.gradients)
    if sizes.to_gradient <= 1:
        return StageBytes(shard, state.weights, whole, last=flat)
    # A gradient is added to the float32 one as soon as it is made, in the last backward all of a unit together.
    return StageBytes(shard, state.weights, whole, backward=made, weight=made, last=flat + max(unit - made, 0))


def _lasting(layout: Layout, state: RankState, sizes: Itemsizes) -> float:
    """Return the bytes of the gradients that stay to the end of the step."""
    return (
        state.part("gradients", layout) * sizes.to_master if layout.is_sharded else state.gradients * sizes.to_gradient
    )


def rank_memory(
    layout: Layout, state: RankState, activations: float, kind: str, sizes: Itemsizes, message: float
) -> RankMemory:
    """Return the memory of a rank.

    Args:
        layout: the layout.
        state: state of the rank.
        activations: peak of activations and temporary tensors, beyond the gradients of all its stages.
        kind: kind of its device, such as ``"cuda"``.
        sizes: bytes of the numbers.
        message: bytes of the largest message between stages.
    """
    weights: float = state.weights
    gradients = _lasting(layout, state, sizes)
    on_cuda = has_streams(kind)
    buckets = 0.0
    if layout.is_sharded:
        weights = state.part("weights", layout) * sizes.to_master
        optimizer = _MOMENTS * gradients
        step = gradients if on_cuda else 3 * state.largest * sizes.to_master / layout.copies
    elif layout.zero:
        optimizer = math.ceil(state.part("sharded", layout))
        bucket = min(gradients, max(BUCKET_BYTES, state.largest * sizes.to_gradient))
        part = state.part("gradients", layout) * sizes.to_master
        # gloo sends copies of the buckets, and gathers into copies.
        step = part + min(_BUCKETS * bucket, gradients) * (1 if on_cuda else 2)
    else:
        optimizer = state.optimizer
        # torch steps all parameters at once on CUDA, and one after the other on the CPU.
        step = gradients if on_cuda else 3 * state.largest
        buckets = min(state.copied, _COPIED_BYTES + BUCKET_BYTES) if layout.data > 1 else 0
    transport = 0.0
    if kind == "cpu" and layout.pipeline > 1:
        # Each way as many messages as 1F1B has in flight. Where a rank is late, other families have more.
        transport = 2 * min(slots_of(int(message)), layout.stages) * message
    if on_cuda:
        made = communicators(layout.pipeline, layout.data, layout.tensor)
        transport = made * COMMUNICATOR_BYTES + (MESSAGES_HELD * message if layout.pipeline > 1 else 0.0)
    return RankMemory(weights, gradients, optimizer, activations, step, buckets, transport)


# Kinds of actions that end the backward of a microbatch.
_ENDS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


def activation_peak(actions: Sequence[Action], costs: Sequence[StageCosts], parts: Mapping[int, StageBytes]) -> float:
    """Return the peak of activations and temporary tensors of a rank, beyond the lasting gradients of all its stages.

    The first stage has no input-gradient: its weight-gradient is the whole backward.

    Args:
        actions: compute actions of the rank.
        costs: of all stages.
        parts: weights and gradients of each of its stages.
    """
    now = peak = 0.0
    missing = sum(each.gradients for each in parts.values())
    begun: set[int] = set()
    made: set[int] = set()
    # Whole gradients of recomputed layers that wait for a weight-gradient, by stage.
    waiting: dict[int, float] = {}
    lasts = {action.stage: number for number, action in enumerate(actions) if action.kind in _ENDS}
    for number, (stage, kind, _, _) in enumerate(actions):
        cost, part = costs[stage], parts[stage]
        if stage not in begun:
            begun.add(stage)
            now += part.gathered
        before = top = now
        if kind is ActionKind.FORWARD:
            now += cost.held + part.held
            top = now + cost.forward_extra + part.forward
        elif kind is ActionKind.BACKWARD or (kind is ActionKind.WEIGHT_GRADIENT and stage == 0):
            now -= cost.held + part.held
            # A weight-gradient has all gradients whole at its end.
            is_whole = part.reduces_each and kind is ActionKind.WEIGHT_GRADIENT
            own = cost.at_once + cost.deferred + part.weight if is_whole else part.backward
            top = before + cost.backward_extra + own
        elif kind is ActionKind.INPUT_GRADIENT and stage:
            now += cost.kept - cost.held - part.held
            # It frees what it does not keep at its end.
            top = before + cost.kept_gradients + cost.at_once + part.forward
            if part.reduces_each and stage not in waiting:
                waiting[stage] = cost.at_once
                now += cost.at_once
        elif kind is ActionKind.WEIGHT_GRADIENT:
            now -= cost.kept
            # All gradients are made before they are added to the gradients of earlier microbatches, or reduced.
            grown = now + cost.deferred if stage in made or part.reduces_each else now
            top = max(before, grown) + part.weight
            now -= waiting.pop(stage, 0.0)
        is_last = lasts[stage] == number
        peak = max(peak, top + (part.last if is_last else 0.0) - missing)
        if kind not in _ENDS:
            continue
        if is_last and stage in made:
            now -= part.whole
        elif not is_last and stage not in made:
            now += part.whole
        if is_last:
            now -= part.gathered
        if is_last if part.gathered else stage not in made:
            missing -= part.gradients
        made.add(stage)
        peak = max(peak, now - missing)
    return peak
