"""Shape of a stage's autograd graph, and its comparison with the graphs of later microbatches."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from operator import methodcaller
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from nxdpp.ground.torch_names import RAW_SAVED, SAVED_TENSOR, SEQUENCE_NUMBER

_logger = logging.getLogger(__name__)

HOOKS_ARE_SHOWN = SAVED_TENSOR.exists and hasattr(SAVED_TENSOR.found, "unpack_hook")
"""``True`` where a saved tensor shows its hook; torch 2.9 does not."""

sequence_number = methodcaller(SEQUENCE_NUMBER.name)
"""The number of a node: of the nodes that can run, autograd's engine takes the one of the greatest number."""

# (node, input of the node)
Edge = tuple[int, int]


@dataclass(frozen=True)
class SplitNode:
    """A node that runs a second time, for its other gradients.

    ``takes`` has the position of each of these among the node's gradients, and its edge.
    """

    node: int
    takes: list[tuple[int, Edge]]


@dataclass
class WeightGroup:
    """Gradients of parameters that are computed together: by ``split_nodes``, and from ``roots`` outside of ``R``."""

    roots: list[int] = field(default_factory=list)
    split_nodes: list[SplitNode] = field(default_factory=list)


@dataclass(frozen=True)
class Structure:
    """The shape of a graph. Nodes are numbers: received values first, then roots, then in the order of the walk.

    Attributes:
        received: number of received values.
        roots: node and output of each root.
        types: the type of each node.
        edges: the edges of each node: the next node, and its input.
        weight_groups: the gradients of parameters that can wait.
        immediate: leaves whose gradient cannot wait.
        freeable: node and name of saved tensors that have no use after the input-gradients.
        unhooked: node and name of saved tensors that must not have hooks.
    """

    received: int
    roots: list[Edge]
    types: list[Any]
    edges: list[list[Edge]]
    weight_groups: list[WeightGroup]
    immediate: list[int]
    freeable: list[tuple[int, str]]
    unhooked: list[tuple[int, str]]

    def match(self, received: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> list[Any] | None:
        """The nodes of another graph in the same order, or ``None`` when it does not have exactly this shape.

        This compares every node and every edge: nothing less would notice another path to a parameter. It also
        compares the order in which nodes run, and the hooks of saved tensors.
        """
        # Received values and roots.
        nodes: list[Any] = list(dict.fromkeys(edge.node for edge in received))
        known = len(nodes)
        if known != self.received or len(roots) != len(self.roots):
            return None
        for root, (expected, position) in zip(roots, self.roots, strict=True):
            if root.output_nr != position:
                return None
            if expected == known:
                nodes.append(root.node)
                known += 1
            elif nodes[expected] is not root.node:
                return None
        # Walk: each node's type and edges. The list grows meanwhile.
        types, all_edges = self.types, self.edges
        for number, node in enumerate(nodes):
            if type(node) is not types[number]:
                return None
            if number < self.received:
                continue
            edges = node.next_functions
            expected_edges = all_edges[number]
            if len(edges) != len(expected_edges):
                return None
            for (child, output), (expected, expected_output) in zip(edges, expected_edges):  # noqa: B905
                if output != expected_output:
                    return None
                if expected == known:
                    if child is None:
                        return None
                    nodes.append(child)
                    known += 1
                elif (nodes[expected] if expected >= 0 else None) is not child:
                    return None
        # Order and hooks. Refused: a different number of nodes, one node in place of two, or a different order.
        if known != len(types) or len(set(nodes)) != known or not self._in_order(nodes):
            return None
        for number, name in self.unhooked:
            if is_hooked(nodes[number], name):
                return None
        return nodes

    def _in_order(self, nodes: Sequence[Any]) -> bool:
        for one, other in self._neighbours:  # noqa: SIM110  # a generator takes longer than the comparison
            if sequence_number(nodes[one]) < sequence_number(nodes[other]):
                return False
        return True

    @cached_property
    def _neighbours(self) -> list[tuple[int, int]]:
        """The pairs of nodes that run one after the other."""
        runs = [[split_node.node for split_node in group.split_nodes] for group in self.weight_groups]
        return [pair for nodes in runs for pair in pairwise(nodes)]


def is_hooked(node: Any, name: str) -> bool:
    """Return whether a hook returns this saved tensor; activation checkpointing recomputes it there."""
    if HOOKS_ARE_SHOWN and isinstance(saved := getattr(node, name), SAVED_TENSOR.found):
        return unpack_hook(saved) is not None
    return any(unpack_hook(saved) is not None for saved in saved_tensors(node, name))


def unpack_hook(saved: Any) -> Any:
    """The hook that returns a ``SavedTensor``; where torch does not show it, each tensor counts as hooked."""
    return saved.unpack_hook if HOOKS_ARE_SHOWN else saved


@cache
def warn_of_hidden_hooks() -> None:
    """Log a warning, once, where torch does not show the hooks of saved tensors."""
    if not HOOKS_ARE_SHOWN:
        _logger.warning(
            "torch %s does not show the hooks of saved tensors: nearly all weight-gradients are computed with the "
            "input-gradients, and zero-bubble schedules gain nothing; the numbers are the same; torch 2.13 splits them",
            torch.__version__,
        )


def saved_tensors(node: Any, name: str) -> Sequence[Any]:
    """The ``SavedTensor`` objects under the attribute ``name`` of a node."""
    found = getattr(node, name)
    if found is None:
        return ()
    return found if isinstance(found, (tuple, list)) else (found,)


_SAVED_NAMES: dict[type, list[str]] = {}


def saved_names(node_type: type) -> list[str]:
    """The attributes of a type of node that hold ``SavedTensor`` objects."""
    if node_type not in _SAVED_NAMES:
        _SAVED_NAMES[node_type] = [name for name in dir(node_type) if name.startswith(RAW_SAVED.name)]
    return _SAVED_NAMES[node_type]
