"""Peak memory of a rank: state, activations in flight, the operation that runs, buckets and messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxdpp.pipeline.partition.transport_bytes import COMMUNICATOR_BYTES, MESSAGES_HELD
from nxdpp.planning.layer_times import BUCKET_BYTES
from nxdpp.planning.layout import Layout
from nxdpp.planning.stage_costs import RankState, StageCosts
from nxdpp.ranks.host_link import slots_of
from nxdpp.ranks.transfer_groups import communicators
from nxdpp.schedules.actions import Action, ActionKind

# Copies of gradients that the average sends during backwards take at most this much, and a bucket.
_COPIED_BYTES = 256 * 2**20
# A sum of ZeRO-1 has two buckets in flight.
_BUCKETS = 2
_MASTER_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank at its peak, by part.

    Attributes:
        weights, gradients, optimizer: state.
        activations: of microbatches in flight, with the temporary tensors of the operation that runs and the weights
            that autocast has converted, beyond the gradients.
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


def rank_memory(
    layout: Layout, state: RankState, activations: float, kind: str, itemsize: int, message: float
) -> RankMemory:
    """Return the memory of a rank.

    Args:
        layout: the layout.
        state: state of the rank.
        activations: peak of activations and temporary tensors, beyond the gradients of all its stages.
        kind: kind of its device: ``"cuda"``, or one whose messages gloo sends.
        itemsize: bytes of a number of the parameters.
        message: bytes of the largest message between stages.
    """
    gradients = state.gradients
    on_cuda = kind == "cuda"
    if layout.zero1:
        optimizer = -(-state.sharded // layout.data)
        bucket = min(gradients, max(BUCKET_BYTES, state.largest))
        part = gradients / layout.data * max(_MASTER_BYTES / itemsize, 1.0)
        # gloo sends copies of the buckets, and gathers into copies.
        step = part + min(_BUCKETS * bucket, gradients) * (1 if on_cuda else 2)
        buckets = 0.0
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
    return RankMemory(state.weights, gradients, optimizer, activations, step, buckets, transport)


def activation_peak(actions: Sequence[Action], costs: Sequence[StageCosts], gradients: Mapping[int, float]) -> float:
    """Return the peak of activations and temporary tensors of a rank, beyond the gradients of all its stages.

    The first stage has no input-gradient: its weight-gradient is the whole backward.

    Args:
        actions: compute actions of the rank.
        costs: of all stages.
        gradients: bytes of the gradients of each of its stages. They exist from the end of its first backward.
    """
    now = peak = 0.0
    missing = sum(gradients.values())
    made: set[int] = set()
    for stage, kind, _, _ in actions:
        cost = costs[stage]
        before = now
        top = now
        if kind is ActionKind.FORWARD:
            now += cost.held
            top = now + cost.forward_extra
        elif kind is ActionKind.BACKWARD or (kind is ActionKind.WEIGHT_GRADIENT and stage == 0):
            now -= cost.held
            top = before + cost.backward_extra
        elif kind is ActionKind.INPUT_GRADIENT and stage:
            now += cost.kept - cost.held
            # It frees what it does not keep at its end.
            top = before + cost.kept_gradients + cost.at_once
        elif kind is ActionKind.WEIGHT_GRADIENT:
            now -= cost.kept
            # All gradients are made before they are added to the gradients of earlier microbatches.
            top = now + cost.deferred if stage in made else before
        peak = max(peak, top - missing)
        if kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT) and stage not in made:
            made.add(stage)
            missing -= gradients[stage]
            peak = max(peak, now - missing)
    return peak
