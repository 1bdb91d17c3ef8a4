"""Seconds and bytes of each layer of a model, counted for one tensor-parallel size and number of samples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from torch import fx, nn

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.pipeline.partition.layer_costs import (
    StateBytes,
    activation_bytes,
    layers_and_head,
    shared_names,
    state_bytes,
)
from nxdpp.planning.machine import Link
from nxdpp.tracing.costs.count import NodeCost
from nxdpp.tracing.costs.node_parts import NodeParts
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules import listings

# The average over replicas copies gradients into buckets of this size; larger ones are sent from their memory.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class PlannedState(StateBytes):
    """Number of parameters and bytes of their state; ``sharded`` is the state of all replicas together, with ZeRO-1."""

    sharded: int = 0

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> "PlannedState":
        """Return the state of ``parameters``, each once."""
        given = list(parameters)
        return cls(**vars(state_bytes(given)), sharded=state_bytes(given, 1).optimizer)

    def plus(self, other: "PlannedState", times: int = 1) -> "PlannedState":
        """Return this and ``times`` times ``other``."""
        sums = (a + times * b for a, b in zip(astuple(self), astuple(other), strict=True))
        return PlannedState(*sums)


@dataclass(frozen=True)
class LayerTimes:
    """A layer with the nodes before it, or the head, for one microbatch on one rank.

    Attributes:
        layer: name of the layer.
        forward, input_gradient, weight_gradient: seconds of computation.
        forward_wire, backward_wire: seconds of the bytes of collectives of the tensor group.
        forward_latency, backward_latency: their seconds besides the bytes, for any number of samples.
        tensor_bytes: bytes that a rank sends in them.
        tokens: bytes of tokens that a forward exchanges for experts, also those that stay on a rank, in ``exchanges``
            messages. A backward exchanges as many.
        tokens_wire, tokens_latency: seconds of these, all of a forward.
        held: bytes that the layer keeps for its backward.
        kept: bytes that it keeps between input-gradient and weight-gradient.
        kept_gradients: bytes of ``kept`` that the input-gradient makes.
        taken: bytes of its input, which it keeps if its forward is recomputed.
        forward_extra, backward_extra: the most bytes that it adds to ``held`` while it runs.
        sent: bytes of its values that later layers read. They leave the stage at a cut behind it.
        passed: bytes of values of earlier layers that later ones read too, such as the output of an encoder.
        state: of its parameters.
        largest: bytes of the largest parameter.
        unit: bytes of the parameters of the layer's module.
        rest: bytes of the other ones.
        copied: bytes of gradients that the average over replicas copies into buckets.
        cast: bytes of weights that autocast converts once a step.
        experts: the part of ``state`` of experts over ranks.
        exchanges: number of messages of tokens.
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
    tokens: float
    tokens_wire: float
    tokens_latency: float
    held: float
    kept: float
    kept_gradients: float
    taken: float
    forward_extra: float
    backward_extra: float
    sent: float
    passed: float
    state: PlannedState
    largest: int
    unit: int
    rest: int
    copied: int
    cast: int
    experts: PlannedState
    exchanges: int
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
    def exchange(self) -> float:
        """Seconds of the messages of tokens of a forward, or of a backward."""
        return self.tokens_wire + self.tokens_latency

    @property
    def again(self) -> float:
        """Seconds of a forward that is recomputed."""
        return self.forward + self.forward_tensor + self.exchange

    @property
    def work(self) -> float:
        """Seconds of forward and backward."""
        return self.again + self.input_gradient + self.weight_gradient + self.backward_tensor + self.exchange

    def slower(self, forward: float, backward: float) -> "LayerTimes":
        """Return this with the seconds of computation times a factor for the forward and one for the backward."""
        return replace(
            self,
            forward=self.forward * forward,
            input_gradient=self.input_gradient * backward,
            weight_gradient=self.weight_gradient * backward,
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
        estimated: True if some costs are estimated from the parameters.
    """

    layers: list[LayerTimes]
    shared: float
    shared_forward: float
    estimated: bool
    tied: list["TiedState"]


@dataclass(frozen=True)
class TiedState:
    """A parameter that several layers have: the layers by number, and what each of them counts."""

    layers: tuple[int, ...]
    state: PlannedState


def counted_layers(
    traced: TracedGraph, root: nn.Module, costs: Mapping[fx.Node, NodeCost], speed: float, link: Link, tokens: Link
) -> tuple[list[LayerTimes], list[TiedState]]:
    """Return the layers and the head, and the parameters that several of them have.

    Args:
        traced: the graph of a microbatch.
        root: its module.
        costs: of each node.
        speed: FLOPs a second.
        link: between the ranks of the tensor group.
        tokens: over which a rank exchanges all tokens of experts, also those that stay.
    """
    names, assigned, owners = layers_and_head(traced, root)
    parameters = dict(listings.named_parameters(root, remove_duplicate=False))
    shared = shared_names(traced, assigned)
    by_layer: list[list[fx.Node]] = [[] for _ in names]
    for node in traced.graph.nodes:
        if node in assigned:
            by_layer[assigned[node]].append(node)
    found: list[LayerTimes] = []
    for index, name in enumerate(names):
        nodes = by_layer[index]
        held_here = {parameter: parameters[parameter] for parameter, held in owners.items() if index in held}
        state = PlannedState.of(held_here.values())
        unit = state_bytes(each for key, each in held_here.items() if key.startswith(f"{name}.")).weights
        parts = [costs[node].parts or NodeParts() for node in nodes]
        held = activation_bytes(nodes, costs, traced, shared)
        forward_peak, backward_peak = _peaks(nodes, costs, parts)
        sent = _sent_bytes(nodes, assigned, costs, index)
        earlier = [node for before in by_layer[:index] for node in before]
        forward_sent = sum(part.forward_sent for part in parts)
        backward_sent = sum(part.backward_sent for part in parts)
        exchanged, exchanges = sum(part.tokens for part in parts), sum(part.exchanges for part in parts)
        found.append(
            LayerTimes(
                layer=name,
                forward=sum(part.forward for part in parts) / speed,
                input_gradient=sum(part.input_gradient for part in parts) / speed,
                weight_gradient=sum(part.weight_gradient for part in parts) / speed,
                forward_wire=forward_sent / link.bytes_per_second,
                backward_wire=backward_sent / link.bytes_per_second,
                forward_latency=link.latency * sum(part.forward_steps for part in parts),
                backward_latency=link.latency * sum(part.backward_steps for part in parts),
                tensor_bytes=forward_sent + backward_sent,
                tokens=exchanged,
                tokens_wire=exchanged / tokens.bytes_per_second,
                tokens_latency=exchanges * tokens.latency,
                held=held,
                kept=sum(part.kept for part in parts),
                kept_gradients=sum(part.kept_gradients for part in parts),
                taken=found[-1].sent if found else sent,
                forward_extra=max(forward_peak - held, 0.0),
                backward_extra=max(backward_peak - held, 0.0),
                sent=sent,
                passed=_sent_bytes(earlier, assigned, costs, index),
                state=state,
                largest=max((each.nbytes for each in held_here.values()), default=0),
                unit=unit,
                rest=state.weights - unit,
                copied=sum(
                    each.nbytes for each in held_here.values() if each.requires_grad and each.nbytes < BUCKET_BYTES
                ),
                cast=sum(costs[node].cast_bytes for node in nodes),
                experts=PlannedState.of(filter(is_of_experts, held_here.values())),
                exchanges=exchanges,
                is_layer=name in traced.layers,
            )
        )
    return found, _tied(parameters, owners)


def _tied(parameters: Mapping[str, nn.Parameter], owners: Mapping[str, set[int]]) -> list[TiedState]:
    held: dict[int, set[int]] = {}
    for name, layers in owners.items():
        if name in parameters:
            held.setdefault(id(parameters[name]), set()).update(layers)
    by_identity = {id(parameter): parameter for parameter in parameters.values()}
    return [
        TiedState(tuple(sorted(layers)), PlannedState.of([by_identity[identity]]))
        for identity, layers in held.items()
        if len(layers) > 1
    ]


def _peaks(
    nodes: Sequence[fx.Node], costs: Mapping[fx.Node, NodeCost], parts: Sequence[NodeParts]
) -> tuple[float, float]:
    """Return the most bytes of forward and backward of ``nodes``: the bytes of one, and all that earlier ones hold."""
    forward = backward = before = 0
    seen: set[str] = set()
    outputs = {node.name: costs[node].output_bytes for node in nodes}
    for node, part in zip(nodes, parts, strict=True):
        cost = costs[node]
        for name in cost.saved_values:
            if name in outputs and name not in seen:
                seen.add(name)
                before += outputs[name]
        forward = max(forward, before + part.forward_live)
        backward = max(backward, before + part.backward_live)
        before += cost.saved_bytes
    return forward, backward


def _sent_bytes(
    nodes: Sequence[fx.Node], assigned: Mapping[fx.Node, int], costs: Mapping[fx.Node, NodeCost], layer: int
) -> float:
    """Return the bytes of values of ``nodes`` that later layers read."""
    return sum(
        costs[node].output_bytes for node in nodes if any(assigned.get(user, layer) > layer for user in node.users)
    )
