"""Seconds and bytes of each layer of a model, for one tensor-parallel size and number of samples."""

from dataclasses import dataclass, fields, replace
from typing import Any

# The average over replicas copies gradients into buckets of this size; larger ones are sent from their memory.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class LayerTimes:
    """A layer with the nodes before it, or the head, for one microbatch on one rank.

    Attributes:
        layer: name of the layer.
        forward, input_gradient, weight_gradient: seconds of computation.
        forward_wire, backward_wire: seconds of the bytes of collectives of the tensor group.
        forward_latency, backward_latency: their seconds beside the bytes, for any number of samples.
        tensor_bytes: bytes that a rank sends in them.
        held: bytes that the layer keeps for its backward.
        kept: bytes that it keeps between input-gradient and weight-gradient.
        kept_gradients: those of them that the input-gradient makes.
        taken: bytes of its input, which it keeps if its forward is recomputed.
        forward_extra, backward_extra: the most bytes beside those held, while it runs.
        sent: bytes of its values that later layers read. They leave the stage at a cut behind it.
        passed: bytes of values of earlier layers that later ones read too, such as the output of an encoder.
        parameters, weights, gradients, optimizer: number of parameters, and bytes; AdamW's state without ZeRO-1.
        sharded: bytes of the state of all replicas together, with ZeRO-1.
        largest: bytes of the largest parameter.
        copied: bytes of gradients that the average over replicas copies into buckets.
        is_layer: False for the head. Checkpoints are of layers.
    """

    layer: str
    forward: float
    input_gradient: float
    weight_gradient: float
    forward_wire: float
    backward_wire: float
    forward_latency: float
    backward_latency: float
    tensor_bytes: float
    held: float
    kept: float
    kept_gradients: float
    taken: float
    forward_extra: float
    backward_extra: float
    sent: float
    passed: float
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    sharded: int
    largest: int
    copied: int
    is_layer: bool = True

    @property
    def forward_tensor(self) -> float:
        """Seconds of collectives of the tensor group in the forward."""
        return self.forward_wire + self.forward_latency

    @property
    def backward_tensor(self) -> float:
        """Seconds of collectives of the tensor group in the backward."""
        return self.backward_wire + self.backward_latency

    @property
    def work(self) -> float:
        """Seconds of forward and backward."""
        computed = self.forward + self.input_gradient + self.weight_gradient
        return computed + self.forward_tensor + self.backward_tensor

    def slower(self, factor: float) -> "LayerTimes":
        """Return this with ``factor`` times the seconds of computation."""
        return replace(
            self,
            forward=self.forward * factor,
            input_gradient=self.input_gradient * factor,
            weight_gradient=self.weight_gradient * factor,
        )

    def plus(self, other: "LayerTimes", share: float) -> "LayerTimes":
        """Return this + ``share`` * (``other`` - this), for what depends on the samples."""
        changed: dict[str, Any] = {
            name: value + share * (getattr(other, name) - value) for name, value in self._of_samples()
        }
        return replace(self, **changed)

    def grown(self, one: "LayerTimes", more: "LayerTimes") -> "LayerTimes":
        """Return this with the growth from ``one`` to ``more``: of the same layer with 1 sample, and with more."""
        sent = more.sent / one.sent if one.sent else more.work / one.work if one.work else 1.0
        changed: dict[str, Any] = {}
        for name, value in self._of_samples():
            before = getattr(one, name)
            changed[name] = value * (getattr(more, name) / before if before else sent)
        return replace(self, **changed)

    def _of_samples(self) -> list[tuple[str, float]]:
        """Return names and values of the fields that depend on the number of samples."""
        names = [each.name for each in fields(self) if each.type is float and not each.name.endswith("_latency")]
        return [(name, getattr(self, name)) for name in names]


@dataclass(frozen=True)
class CountedModel:
    """All layers, and values of no layer.

    Attributes:
        layers: each layer in order, then the head if it has parameters.
        shared: bytes of values of no layer that each stage keeps of a microbatch: masks, rotary tables, inputs.
        shared_forward: seconds in which each stage computes them.
        message: bytes of the largest message between stages.
        estimated: True if some costs are estimated from the parameters.
    """

    layers: list[LayerTimes]
    shared: float
    shared_forward: float
    message: float
    estimated: bool
    tied: list["TiedState"]


@dataclass(frozen=True)
class TiedState:
    """A parameter that several layers have: those layers by number, and what each of them counts."""

    layers: tuple[int, ...]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    sharded: int
