"""Layers of a traced model with the counted costs of their nodes."""

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from nxdpp.pipeline.cost.count import NodeCost
from nxdpp.pipeline.cost.layer_costs import activation_bytes, layers_and_head, shared_names, state_bytes
from nxdpp.pipeline.cost.node_parts import NodeParts
from nxdpp.pipeline.planning.layer_times import BUCKET_BYTES, LayerTimes, TiedState
from nxdpp.pipeline.planning.machine import Link
from nxdpp.tracing import listings
from nxdpp.tracing.trace import TracedGraph


def counted_layers(
    traced: TracedGraph,
    root: nn.Module,
    costs: Mapping[fx.Node, NodeCost],
    speed: float,
    link: Link,
) -> tuple[list[LayerTimes], list[TiedState]]:
    """Return the layers and the head, and the parameters that several of them have.

    Args:
        traced: the graph of a microbatch.
        root: its module.
        costs: of each node.
        speed: FLOPs a second.
        link: between the ranks of the tensor group.
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
