"""Seconds and bytes of each layer of a model, for a tensor-parallel size and a number of samples.

Layers are counted on the meta device. All terms are affine in the number of samples but for the roofline's maximum:
where 4 samples are on the line through 1 and 2, so are others; else powers of 2 are counted. A divided model is counted
for one sample, and each of its terms grows as that of the whole model.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import fx, nn

from nxdpp.parallel_layers.launch import choose_device
from nxdpp.pipeline.cost.count import NodeCost, count_costs
from nxdpp.pipeline.cost.layer_costs import activation_bytes, layers_and_head, shared_bytes, shared_names, state_bytes
from nxdpp.pipeline.cost.measure import measure_nodes
from nxdpp.pipeline.cost.node_parts import CountedParts, NodeParts
from nxdpp.pipeline.cost.transport_bytes import largest_message
from nxdpp.pipeline.planning.dimensions import Dimensions, divided
from nxdpp.pipeline.planning.dtypes import dtype_of
from nxdpp.pipeline.planning.job import Job
from nxdpp.pipeline.planning.machine import Link, Machine
from nxdpp.tracing import listings
from nxdpp.tracing.input_dicts import InputDict, open_inputs
from nxdpp.tracing.layers import find_layer_classes
from nxdpp.tracing.trace import TracedGraph, TracingOptions, trace_for

M = TypeVar("M", bound=nn.Module)

# The largest relative distance of 4 samples from the line through 1 and 2 that counts as none.
_OFF_A_LINE = 0.005
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


class ModelCosts:
    """Costs of a model for each layout, counted when asked for.

    Args:
        model: the model, not divided. It is not changed, and may be on the meta device.
        machine: gives the speed.
        job: gives the inputs.
        profiled: measure the seconds of layers on this process's device, for a model that no tensor group divides.
            Their parts, and divided models, have the shares that are counted.

    Its methods raise ``ValueError`` for a model that a tensor group cannot divide, and ``TracingError`` for one that
    cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        machine: Machine,
        job: Job,
        profiled: bool = False,
        transformer_layer_cls: Any | None = None,
        tensor_plan: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = machine
        self.job = job
        self._model = model
        self._profiled = profiled
        self._layer_cls = transformer_layer_cls
        self._tensor_plan = tensor_plan
        self._measured: list[float] = []
        self.dtype = dtype_of(model)
        # States of the ranks of layouts, kept by ``predict``.
        self.states: dict[Any, Any] = {}
        self._line: bool | None = None
        self._counted: dict[tuple[int, bool, int], CountedModel] = {}
        self._interpolated: dict[tuple[int, bool, int], CountedModel] = {}

    def of(self, tensor: int, sequence: bool, microbatch: int) -> CountedModel:
        """Return the costs for a tensor-parallel size and ``microbatch`` samples."""
        key = (tensor, sequence, microbatch)
        if key not in self._interpolated:
            self._interpolated[key] = self._of(*key)
        return self._interpolated[key]

    def _of(self, tensor: int, sequence: bool, microbatch: int) -> CountedModel:
        if tensor == 1:
            return self._of_whole(microbatch)
        divided_one = self._count(tensor, sequence, 1)
        if microbatch == 1:
            return divided_one
        one, more = self._of_whole(1), self.of(1, False, microbatch)
        layers = [each.grown(a, b) for each, a, b in zip(divided_one.layers, one.layers, more.layers, strict=True)]
        return _grown(divided_one, layers, more.shared / one.shared if one.shared else 1.0, microbatch)

    def _of_whole(self, microbatch: int) -> CountedModel:
        """Return the costs of the model that no tensor group divides: counted for powers of 2, or on a line."""
        below = 1 << (microbatch.bit_length() - 1)
        if microbatch <= 2 or (below == microbatch and not self._is_line()):
            return self._count(1, False, microbatch)
        if self._is_line():
            below = 1
        one, two = self._count(1, False, below), self._count(1, False, 2 * below)
        share = microbatch / below - 1
        layers = [a.plus(b, share) for a, b in zip(one.layers, two.layers, strict=True)]
        shared = one.shared + share * (two.shared - one.shared)
        return _grown(one, layers, shared / one.shared if one.shared else 1.0, microbatch / below)

    def _is_line(self) -> bool:
        """Return whether the work of 4 samples is on the line through 1 and 2."""
        if self._line is None:
            one, two, four = (sum(layer.work for layer in self._count(1, False, n).layers) for n in (1, 2, 4))
            self._line = abs(one + 3 * (two - one) - four) <= _OFF_A_LINE * four
        return self._line

    def _count(self, tensor: int, sequence: bool, microbatch: int) -> CountedModel:
        key = (tensor, sequence, microbatch)
        if key not in self._counted:
            self._counted[key] = self._counted_now(Dimensions(tensor, sequence=sequence), microbatch)
        return self._counted[key]

    def _counted_now(self, sizes: Dimensions, microbatch: int) -> CountedModel:
        inputs = self.job.inputs(microbatch)
        opened = open_inputs(inputs, all_kinds=True)
        batch = {name: value for name, value in opened.items() if not isinstance(value, InputDict)}
        sizes.check_length(batch)
        device = self.machine.device
        speed = device.flops(self.dtype)
        how = CountedParts(device.balance(self.dtype), device.operation_seconds * speed)
        model = on_meta(self._model) if sizes.tensor > 1 else self._model
        # Modules of a divided model are of classes derived from these.
        given = None if self._layer_cls is None else find_layer_classes(model, self._layer_cls)
        with divided(model, sizes, self._tensor_plan):
            options = TracingOptions(given or find_layer_classes(model, None))
            traced = trace_for(model, inputs, options)
            costs = count_costs(traced, model, batch, parts=how)
            if self._profiled and not self._measured:
                # The first count is of the whole model with one sample.
                self._measured = _quotients(traced, model, batch, costs, speed, choose_device(None, device.kind))
        link = self.machine.link_of(sizes.tensor, 1)

        layers, tied = _layers(traced, model, costs, speed, link)
        if self._measured:
            layers = [layer.slower(by) for layer, by in zip(layers, self._measured, strict=True)]
        nowhere = shared_names(traced, layers_and_head(traced, model)[1])
        of_none = sum(cost.parts.forward for node, cost in costs.items() if cost.parts and node.name in nowhere)
        estimated = any(cost.estimated for cost in costs.values())
        shared = shared_bytes(traced, model, costs)
        return CountedModel(layers, shared, of_none / speed, largest_message(traced, costs), estimated, tied)


def _grown(one: CountedModel, layers: list[LayerTimes], shared: float, message: float) -> CountedModel:
    return replace(
        one,
        layers=layers,
        shared=one.shared * shared,
        shared_forward=one.shared_forward * shared,
        message=one.message * message,
    )


def _quotients(
    traced: TracedGraph,
    root: nn.Module,
    inputs: Mapping[str, Any],
    costs: Mapping[fx.Node, NodeCost],
    speed: float,
    device: torch.device,
) -> list[float]:
    """Return measured / counted seconds of each layer and the head."""
    names, assigned, _ = layers_and_head(traced, root)
    seconds = measure_nodes(traced, root, inputs, assigned, device)
    measured, counted = [0.0] * len(names), [0.0] * len(names)
    for node, layer in assigned.items():
        measured[layer] += seconds.get(node, 0.0)
        counted[layer] += costs[node].work / speed
    return [a / b if a and b else 1.0 for a, b in zip(measured, counted, strict=True)]


def on_meta(model: M) -> M:
    """Copy ``model`` to the meta device, with its ties."""
    memo: dict[int, Any] = {}
    for tensor in (*listings.parameters(model), *listings.buffers(model)):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _layers(
    traced: TracedGraph,
    root: nn.Module,
    costs: Mapping[fx.Node, NodeCost],
    speed: float,
    link: Link,
) -> tuple[list[LayerTimes], list[TiedState]]:
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
        held_here = [parameters[parameter] for parameter, held in owners.items() if index in held]
        state, sharded = state_bytes(held_here), state_bytes(held_here, 1)
        parts = [costs[node].parts or NodeParts() for node in nodes]
        held = activation_bytes(nodes, costs, traced, shared)
        forward_peak, backward_peak = _peaks(nodes, costs, parts)
        sent = _sent_bytes(nodes, assigned, costs, index)
        earlier = [node for before in by_layer[:index] for node in before]
        forward_sent = sum(part.forward_sent for part in parts)
        backward_sent = sum(part.backward_sent for part in parts)
        found.append(
            LayerTimes(
                layer=name,
                forward=sum(part.forward for part in parts) / speed,
                input_gradient=sum(part.input_gradient for part in parts) / speed,
                weight_gradient=sum(part.weight_gradient for part in parts) / speed,
                forward_wire=forward_sent / link.bytes_per_second,
                backward_wire=backward_sent / link.bytes_per_second,
                forward_latency=link.latency * sum(part.forward_collectives for part in parts),
                backward_latency=link.latency * sum(part.backward_collectives for part in parts),
                tensor_bytes=forward_sent + backward_sent,
                held=held,
                kept=sum(part.kept for part in parts),
                kept_gradients=sum(part.kept_gradients for part in parts),
                taken=found[-1].sent if found else sent,
                forward_extra=max(forward_peak - held, 0.0),
                backward_extra=max(backward_peak - held, 0.0),
                sent=sent,
                passed=_sent_bytes(earlier, assigned, costs, index),
                parameters=state.parameters,
                weights=state.weights,
                gradients=state.gradients,
                optimizer=state.optimizer,
                sharded=sharded.optimizer,
                largest=max(map(_bytes, held_here), default=0),
                copied=sum(_bytes(each) for each in held_here if each.requires_grad and _bytes(each) < BUCKET_BYTES),
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
    found = []
    for identity, layers in held.items():
        if len(layers) > 1:
            own = [by_identity[identity]]
            state = state_bytes(own)
            sizes = (state.parameters, state.weights, state.gradients, state.optimizer)
            found.append(TiedState(tuple(sorted(layers)), *sizes, state_bytes(own, 1).optimizer))
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _peaks(
    nodes: Sequence[fx.Node], costs: Mapping[fx.Node, NodeCost], parts: Sequence[NodeParts]
) -> tuple[float, float]:
    """Return the most bytes of forward and backward of ``nodes``: those of one, and what the ones before it hold."""
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
