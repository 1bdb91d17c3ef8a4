"""Cuts of counted layers into stages, and the seconds and bytes of each stage."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nxdpp.counted import counted
from nxdpp.planning.layer_times import CountedModel, LayerTimes, PlannedState
from nxdpp.planning.layout import Layout
from nxdpp.schedules.execution import Turns

_MASTER_BYTES = 4
_NO_STATE = PlannedState(0, 0, 0, 0)


@dataclass(frozen=True)
class StageCosts:
    """A stage for one microbatch, on each rank that shares it.

    Attributes:
        first, end: numbers of its first layer, and of the one after its last.
        forward, input_gradient, weight_gradient: seconds, with collectives of the tensor group.
        tensor_seconds: seconds of the collectives only, forward and backward.
        tensor_bytes: bytes that a rank sends in them.
        exchange: seconds of the messages of tokens of a forward, ``exchanges`` of them, or of a backward. They are
            among the seconds of each.
        recomputed_exchange: seconds of those that a recomputed forward sends again.
        tokens: bytes of all of them, also those that stay on a rank.
        held: bytes kept from the forward to the backward.
        kept: bytes kept from the input-gradient to the weight-gradient.
        kept_gradients: bytes of ``kept`` that the input-gradient makes.
        at_once, deferred: bytes of gradients of parameters that an input-gradient or a weight-gradient makes before it
            adds them to the gradients of earlier microbatches.
        forward_extra, backward_extra: the most bytes that it adds to ``held`` while it runs.
        sent: bytes that go to later stages. Bytes that skip stages count on each one.
    """

    first: int
    end: int
    forward: float
    input_gradient: float
    weight_gradient: float
    tensor_seconds: float
    tensor_bytes: float
    exchange: float
    exchanges: int
    recomputed_exchange: float
    tokens: float
    held: float
    kept: float
    kept_gradients: float
    at_once: float
    deferred: float
    forward_extra: float
    backward_extra: float
    sent: float

    @property
    def work(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def exchange_seconds(self) -> float:
        """Seconds of all messages of tokens."""
        return 2 * self.exchange + self.recomputed_exchange

    def turns(self, seconds: float) -> Turns:
        """Return the computations of an action of ``seconds``, of equal length, with the messages between them."""
        if not self.exchanges:
            return [(seconds, 0.0)]
        each = (seconds - self.exchange) / (self.exchanges + 1)
        return [*[(each, self.exchange / self.exchanges)] * self.exchanges, (each, 0.0)]


@dataclass(frozen=True)
class Itemsizes:
    """Bytes of a number of the parameters, and of their gradients as they accumulate and are reduced."""

    parameter: int
    gradient: int

    @property
    def to_gradient(self) -> float:
        """Bytes of a gradient over those of its parameter."""
        return self.gradient / self.parameter

    @property
    def to_master(self) -> float:
        """Bytes of a master copy, of float32 at least, over those of its parameter."""
        return max(_MASTER_BYTES / self.parameter, 1.0)


@dataclass(frozen=True)
class RankState(PlannedState):
    """State of a rank, or of one stage.

    Attributes:
        largest: bytes of its largest parameter.
        unit: bytes of the largest layer, which ``fully_shard`` gathers at once.
        rest: bytes of the parameters of no layer, which it gathers at once too.
        copied: bytes that the average copies into buckets.
        cast: bytes of weights that autocast converts, from the first forward of a step to the last backward.
        experts: the part of it of experts over ranks.
    """

    largest: int = 0
    unit: int = 0
    rest: int = 0
    copied: int = 0
    cast: int = 0
    experts: PlannedState = _NO_STATE

    def part(self, of: str, layout: Layout) -> float:
        """Return a rank's part of the bytes ``of`` a name, where those that have the same parameters share them."""
        whole: int = getattr(self, of)
        experts: int = getattr(self.experts, of)
        return (whole - experts) / layout.data + experts / layout.copies


def stage_ends(model: CountedModel, stages: int, checkpoint: bool) -> list[int]:
    """Return the number of layers up to the end of each stage, for the least work of the slowest stage.

    Among such cuts the stages are as even as a walk from the first to the last one makes them. Raises ``ValueError``
    for fewer layers than stages.
    """
    works = [_work(layer, checkpoint) for layer in model.layers]
    if len(works) < stages:
        raise ValueError(f"{counted(len(works), 'layer')}, the head included, cannot be split over {stages} stages.")
    sums = list(accumulate(works, initial=0.0))
    slowest = _least_slowest(sums, stages)
    # The earliest end of each stage from which the later ones can take the rest.
    earliest = [len(works)] * stages
    for stage in range(stages - 2, -1, -1):
        needed = bisect_left(sums, sums[earliest[stage + 1]] - slowest)
        earliest[stage] = min(max(needed, stage + 1), earliest[stage + 1] - 1)
    ends: list[int] = []
    start = 0
    for stage in range(stages - 1):
        latest = min(_reached(sums, start, slowest), len(works) - (stages - stage - 1))
        even = sums[start] + (sums[-1] - sums[start]) / (stages - stage)
        nearest = bisect_left(sums, even)
        if nearest > start and sums[nearest] - even > even - sums[nearest - 1]:
            nearest -= 1
        start = max(min(max(nearest, earliest[stage], start + 1), latest), start + 1)
        ends.append(start)
    return [*ends, len(works)]


def _least_slowest(sums: Sequence[float], stages: int) -> float:
    """Return the least work of the slowest of ``stages`` contiguous stages, to a part in a million."""
    low = max(sums[-1] / stages, max(b - a for a, b in pairwise(sums)))
    high = sums[-1]
    if _fits(sums, stages, low * (1 + 1e-9)):
        return low * (1 + 1e-9)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(sums, stages, middle) else (middle, high)
    return high


def _fits(sums: Sequence[float], stages: int, slowest: float) -> bool:
    start, layers = 0, len(sums) - 1
    for stage in range(stages):
        start = min(_reached(sums, start, slowest), layers - (stages - stage - 1))
    return start >= layers


def _reached(sums: Sequence[float], start: int, slowest: float) -> int:
    return max(bisect_right(sums, sums[start] + slowest) - 1, start + 1)


def _work(layer: LayerTimes, checkpoint: bool) -> float:
    return layer.work + (layer.again if checkpoint and layer.is_layer else 0.0)


def stage_costs(model: CountedModel, ends: Sequence[int], checkpoint: bool, action_seconds: float) -> list[StageCosts]:
    """Return the costs of each stage of ``ends``; with ``checkpoint`` layers recompute their forward."""
    return [
        _stage(model, start, end, checkpoint, action_seconds) for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _stage(model: CountedModel, first: int, end: int, checkpoint: bool, action_seconds: float) -> StageCosts:
    layers = model.layers[first:end]
    recomputed = [layer for layer in layers if checkpoint and layer.is_layer]
    again = sum(layer.again for layer in recomputed)
    exchange = sum(layer.exchange for layer in layers)
    recomputed_exchange = sum(layer.exchange for layer in recomputed)
    again_tensor = sum(layer.forward_tensor for layer in recomputed)
    # The weight-gradients of a recomputed layer cannot wait for a later action.
    at_once = sum(layer.weight_gradient for layer in recomputed)
    forward_tensor = sum(layer.forward_tensor for layer in layers)
    backward_tensor = sum(layer.backward_tensor for layer in layers) + again_tensor
    input_gradient = sum(layer.input_gradient + layer.backward_tensor for layer in layers) + again + at_once + exchange
    weight_gradient = sum(layer.weight_gradient for layer in layers) - at_once
    held, forward_extra, backward_extra = _memory(layers, checkpoint)
    last = end == len(model.layers)
    leaving = 0.0 if last else layers[-1].sent + layers[-1].passed
    # A stage keeps the values that it has sent, and values of earlier layers that its recomputed layers read.
    passed = model.layers[first - 1].passed if first and recomputed else 0.0
    of_all = model.shared + (0.0 if last else layers[-1].sent) + passed
    whole = [layer for layer in layers if not (checkpoint and layer.is_layer)]
    return StageCosts(
        first=first,
        end=end,
        forward=sum(layer.again for layer in layers) + model.shared_forward + action_seconds,
        input_gradient=input_gradient + action_seconds,
        weight_gradient=weight_gradient,
        tensor_seconds=forward_tensor + backward_tensor,
        tensor_bytes=sum(layer.tensor_bytes for layer in layers),
        exchange=exchange,
        exchanges=sum(layer.exchanges for layer in layers),
        recomputed_exchange=recomputed_exchange,
        tokens=2 * sum(layer.tokens for layer in layers) + sum(layer.tokens for layer in recomputed),
        held=held + of_all,
        kept=sum(layer.kept for layer in whole),
        kept_gradients=sum(layer.kept_gradients for layer in whole),
        at_once=sum(layer.state.gradients for layer in recomputed),
        deferred=sum(layer.state.gradients for layer in whole),
        forward_extra=forward_extra,
        backward_extra=backward_extra,
        sent=leaving,
    )


def largest_sent(stages: Sequence[StageCosts]) -> float:
    """Return the bytes of the largest message between ``stages``."""
    return max((stage.sent for stage in stages), default=0.0)


def _memory(layers: Sequence[LayerTimes], checkpoint: bool) -> tuple[float, float, float]:
    """Return the bytes that the layers hold together, and the most that forward and backward add."""
    held = forward = backward = 0.0
    for layer in layers:
        recomputed = checkpoint and layer.is_layer
        own = layer.taken if recomputed else layer.held
        forward = max(forward, held + layer.held + layer.forward_extra)
        backward = max(backward, held + (own if recomputed else 0.0) + layer.held + layer.backward_extra)
        held += own
    return held, forward - held, backward - held


def rank_state(model: CountedModel, stages: Sequence[StageCosts]) -> RankState:
    """Return the state of a rank that has ``stages``; a tied parameter counts once."""
    held = {number for stage in stages for number in range(stage.first, stage.end)}
    layers = [model.layers[number] for number in sorted(held)]
    state = experts = _NO_STATE
    for layer in layers:
        state, experts = state.plus(layer.state), experts.plus(layer.experts)
    for tied in model.tied:
        state = state.plus(tied.state, -max(len(held.intersection(tied.layers)) - 1, 0))
    return RankState(
        **vars(state),
        largest=max(layer.largest for layer in layers),
        unit=max(layer.unit for layer in layers),
        rest=sum(layer.rest for layer in layers),
        copied=sum(layer.copied for layer in layers),
        cast=sum(layer.cast for layer in layers),
        experts=experts,
    )
