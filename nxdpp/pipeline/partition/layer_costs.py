"""Costs of transformer layers: sums over their nodes.

A layer has the nodes between the previous layer and itself. The head has the nodes after the last layer.

::

    embed   layers.0   layers.1   layers.2   layers.3   norm   lm_head   loss
    └──────────────┘   └──────┘   └──────┘   └──────┘   └──────────────────┘      a cut falls between any two
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx, nn

from nxdpp.pipeline.partition.assignment import Owners, assign_layers, assign_nodes, parameter_owners
from nxdpp.schedules.balance import LayerCost
from nxdpp.tracing.costs.count import NodeCost
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules import listings

# AdamW keeps two moments, of the dtype of the parameter.
_MOMENTS = 2
# Sharded state is of float32 at least, and half parameters have a master copy of it.
_MASTER_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """Number of parameters, and bytes of weights, gradients and AdamW's state."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(parameters: Iterable[nn.Parameter], sharded_over: int | None = None) -> StateBytes:
    """Return the sizes of ``parameters``, each once. Frozen ones have neither gradients nor moments.

    ``sharded_over`` is the number of replicas that share the state under ZeRO-1: each has an equal part of the moments,
    of float32 at least, and of the master copies of half parameters. ``None`` is for the state of plain AdamW.
    """
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in distinct)
    trained = [parameter for parameter in distinct if parameter.requires_grad]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    optimizer = _MOMENTS * gradients
    if sharded_over is not None:
        optimizer = -(-sum(map(_sharded_state, trained)) // sharded_over)
    return StateBytes(sum(parameter.numel() for parameter in distinct), weights, gradients, optimizer)


def layer_costs(
    traced: TracedGraph, root: nn.Module, node_costs: Mapping[fx.Node, NodeCost], sharded_over: int | None = None
) -> list[LayerCost]:
    """Return the cost of each layer of ``traced`` in order, then of the head.

    Without parameters after the last layer, that layer has the later nodes and there is no head. Nodes that follow
    from the inputs only run on every stage and belong to no layer. ``work`` has the unit of ``node_costs``.
    ``sharded_over`` goes to ``state_bytes``.
    """
    names, assigned, owners = layers_and_head(traced, root)
    parameters = dict(listings.named_parameters(root, remove_duplicate=False))
    shared = shared_names(traced, assigned)
    found = []
    for index, name in enumerate(names):
        nodes = [node for node, layer in assigned.items() if layer == index]
        held_here = (parameters[parameter] for parameter, held in owners.items() if index in held)
        state = state_bytes(held_here, sharded_over).total
        work = sum(node_costs[node].work for node in nodes)
        found.append(LayerCost(name, work, state, activation_bytes(nodes, node_costs, traced, shared)))
    return found


def layers_and_head(traced: TracedGraph, root: nn.Module) -> tuple[list[str], dict[fx.Node, int], Owners]:
    """Return the names of ``layer_costs``, the number of the layer of each node, and the layers of each parameter."""
    names = [*traced.layers, "head"]
    assigned = assign_nodes(traced, root, {layer: index for index, layer in enumerate(traced.layers)}, len(names))
    owners = parameter_owners(assigned, root)
    if not any(len(traced.layers) in held for held in owners.values()):
        names.pop()
        assigned = assign_layers(traced, root, traced.layers)
        owners = parameter_owners(assigned, root)
    return names, assigned, owners


def activation_bytes(
    nodes: Iterable[fx.Node], node_costs: Mapping[fx.Node, NodeCost], traced: TracedGraph, without: Iterable[str] = ()
) -> int:
    """Return the bytes that ``nodes`` together keep for the backward of one microbatch.

    Each value counts once. Values of the nodes named in ``without`` do not count.
    """
    chosen = list(nodes)
    saved = {name for node in chosen for name in node_costs[node].saved_values}.difference(without)
    values = sum(node_costs[node].output_bytes for node in traced.graph.nodes if node.name in saved)
    return values + sum(node_costs[node].saved_bytes for node in chosen)


def shared_bytes(traced: TracedGraph, root: nn.Module, node_costs: Mapping[fx.Node, NodeCost]) -> int:
    """Return the bytes of values of no layer that a stage keeps of one microbatch: masks, rotary tables, inputs."""
    assigned = assign_layers(traced, root, traced.layers)
    everything = activation_bytes(assigned, node_costs, traced)
    return everything - activation_bytes(assigned, node_costs, traced, shared_names(traced, assigned))


def _sharded_state(parameter: nn.Parameter) -> int:
    """Bytes of the state of all replicas for ``parameter`` under ZeRO-1."""
    size = parameter.element_size()
    master = _MASTER_BYTES if size < _MASTER_BYTES else 0
    return parameter.numel() * (_MOMENTS * max(size, _MASTER_BYTES) + master)


def shared_names(traced: TracedGraph, assigned: Mapping[fx.Node, int]) -> set[str]:
    """Return the names of the nodes that no layer has."""
    return {node.name for node in traced.graph.nodes if node not in assigned}
