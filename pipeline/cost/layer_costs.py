"""The costs of nodes summed up for each transformer layer with what runs before it, and for what follows the last.

::

    embed   layers.0   layers.1   layers.2   layers.3   norm   lm_head   loss
    └──────────────┘   └──────┘   └──────┘   └──────┘   └──────────────────┘      between any two can be cut
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from nxdpp.pipeline.cost.count import NodeCost
from nxdpp.pipeline.partition.assignment import assign_layers, assign_nodes, parameter_owners
from nxdpp.pipeline.partition.balance import LayerCost
from nxdpp.tracing.trace import TracedGraph

HEAD = "what follows the last layer"

# AdamW keeps two moments for each parameter that is trained, of its dtype.
_MOMENTS = 2


@dataclass(frozen=True)
class StateBytes:
    """Number of parameters, and bytes of weights, gradients and AdamW's moments."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(parameters: Iterable[nn.Parameter]) -> StateBytes:
    """What the distinct ones of ``parameters`` take; frozen ones have neither gradients nor moments."""
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in distinct)
    trained = sum(parameter.numel() * parameter.element_size() for parameter in distinct if parameter.requires_grad)
    return StateBytes(sum(parameter.numel() for parameter in distinct), weights, trained, _MOMENTS * trained)


def layer_costs(
    traced: TracedGraph, root: nn.Module, costs: Mapping[fx.Node, NodeCost], layers: Sequence[str]
) -> list[LayerCost]:
    """The cost of each of ``layers``, in order, then of what follows the last one, named ``HEAD``.

    Where no parameter follows the last layer, what does belongs to it. What follows from the inputs alone runs on
    every stage and belongs to no layer. Work is in the unit of the ``costs``.
    """
    names = [*layers, HEAD]
    numbers = {layer: index for index, layer in enumerate(layers)}
    placed = assign_nodes(traced, root, numbers, len(names))
    owners = parameter_owners(placed, root)
    if not any(len(layers) in places for places in owners.values()):
        names.pop()
        placed = assign_layers(traced, root, layers)
        owners = parameter_owners(placed, root)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    unplaced = {node.name for node in traced.graph.nodes} - {node.name for node in placed}
    found = []
    for index, name in enumerate(names):
        nodes = [node for node, place in placed.items() if place == index]
        own = [parameters[parameter] for parameter, places in owners.items() if index in places]
        found.append(
            LayerCost(
                name,
                sum(costs[node].work for node in nodes),
                state_bytes(own).total,
                activation_bytes(nodes, costs, traced, unplaced),
            )
        )
    return found


def activation_bytes(
    nodes: Iterable[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    traced: TracedGraph,
    without: Iterable[str] = (),
) -> int:
    """What ``nodes`` together keep for the backward of one microbatch, each value once, but those of ``without``."""
    chosen = list(nodes)
    kept = {name for node in chosen for name in costs[node].kept_values}.difference(without)
    values = sum(costs[node].output_bytes for node in traced.graph.nodes if node.name in kept)
    return values + sum(costs[node].kept_bytes for node in chosen)


def shared_bytes(traced: TracedGraph, root: nn.Module, costs: Mapping[fx.Node, NodeCost], layers: Sequence[str]) -> int:
    """What every stage keeps of a microbatch at most beside its layers' own: masks, rotary tables, inputs."""
    placed = assign_layers(traced, root, layers)
    everything = activation_bytes(placed, costs, traced)
    return everything - activation_bytes(placed, costs, traced, {n.name for n in traced.graph.nodes if n not in placed})
