"""Analysis of a stage's autograd graph: the part that leads to received values, and the parts only to parameters.

``R`` is the set of nodes from which a received value can be reached. A *split node* is in ``R``, and has edges to
nodes outside of ``R`` that lead to leaves. The nodes behind these edges compute gradients of parameters only, and can
wait. They need the gradients that the split node was given, and the tensors that it saved.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from nxdpp.devices.kinds import memory_of
from nxdpp.pipeline.backward.structure import (
    Edge,
    SplitNode,
    Structure,
    WeightGroup,
    is_hooked,
    saved_names,
    saved_tensors,
    sequence_number,
    unpack_hook,
)

# One call of these computes the gradients of all inputs, for any wanted part. In torchgen's derivatives.yaml they have
# several gradients from one formula without a mask, or kernels whose work does not depend on the mask.
_AT_ONCE = (
    "CudnnAttentionForward", "CudnnRnn", "EfficientAttentionForward", "EuclideanDist",
    "FakeQuantizeLearnablePerChannelAffine", "FakeQuantizeLearnablePerTensorAffine", "FlashAttentionForward",
    "GridSampler2D", "GridSampler2DCpuFallback", "GridSampler3D", "CudnnGridSampler", "IndexReduce", "ConvTbc",
    "LinearBackward", "LinalgEig", "LinalgEigh", "LinalgHouseholderProduct", "LinalgPolar", "LinalgQr", "LinalgSlogdet",
    "LinalgSvd", "LstmMps", "MiopenRnn", "MkldnnRnnLayer", "Polar", "PreluKernel",
    "ScaledDotProductCudnnAttention", "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFusedAttentionOverrideable", "ScatterReduce",
    "ThnnFusedGruCell", "ThnnFusedLstmCell", "WeightNormInterface",
)  # fmt: skip
AT_ONCE = frozenset(f"{name}Backward0" for name in _AT_ONCE)
# Nodes of extensions have no Python type of their own, and unknown properties.
_UNKNOWN = "CppFunction"
_LEAF = "AccumulateGrad"
# A backward that torch.compile has made may overwrite what it has saved, and refuses a kept graph.
_COMPILED = "CompiledFunctionBackward"
_NOWHERE = -1

# To free a smaller saved tensor costs more time than its memory is worth.
_WORTH_FREEING = 1 << 16
# About so many bytes of gradients are computed before they are added to ``.grad`` of the parameters.
_BYTES_AT_ONCE = 1 << 26


class BackwardAnalysis:
    """Analysis of the last graph, kept for the next graph of the same shape: one for a stage and a signature.

    It holds no node and no tensor.
    """

    def __init__(self) -> None:
        self._last: Structure | None = None

    def of(self, received: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> tuple[Structure, list[Any]]:
        """The structure of the graph between ``roots`` and ``received``, and its nodes."""
        if self._last is not None:
            nodes = self._last.match(received, roots)
            if nodes is not None:
                return self._last, nodes
        self._last, nodes = analyse(received, roots)
        return self._last, nodes


def analyse(received: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> tuple[Structure, list[Any]]:
    """Walk the graph from ``roots`` to ``received`` and the leaves; return its structure and its nodes."""
    graph = _Graph(received, roots)
    return graph.structure(), graph.nodes


@dataclass
class _Exit:
    """An edge on which gradients leave ``R``: from node ``split_node``, or a root outside (-1), to node ``child``.

    ``below`` are the nodes behind it, ``leaves`` the leaves among them.
    """

    split_node: int
    child: int
    below: set[int]
    leaves: set[int]


class _Graph:
    def __init__(self, received: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> None:
        self.nodes: list[Any] = list(dict.fromkeys(edge.node for edge in received))
        self.received = len(self.nodes)
        self._numbers: dict[Any, int] = {node: number for number, node in enumerate(self.nodes)}
        self.roots = [(self._number(root.node), root.output_nr) for root in roots]
        self.edges: list[list[Edge]] = [[] for _ in range(self.received)]
        number = self.received
        while number < len(self.nodes):
            self.edges.append([(self._number(child), output) for child, output in self.nodes[number].next_functions])
            number += 1
        self.types = [type(node) for node in self.nodes]
        self.parents: list[list[int]] = [[] for _ in self.nodes]
        for number, edges in enumerate(self.edges):
            for child, _ in edges:
                if child != _NOWHERE:
                    self.parents[child].append(number)
        met = {child for edges in self.edges for child, _ in edges} | {number for number, _ in self.roots}
        self.leads_back = self._above(number for number in range(self.received) if number in met)
        self.is_leaf = [n >= self.received and node_type.__name__ == _LEAF for n, node_type in enumerate(self.types)]
        self.leads_to_leaf = self._above(number for number, leaf in enumerate(self.is_leaf) if leaf)

    def structure(self) -> Structure:
        exits = self._exits()
        immediate = self._immediate(exits)
        waiting = [exit_ for exit_ in exits if not exit_.leaves & immediate]
        split_nodes = {exit_.split_node for exit_ in waiting if exit_.split_node != _NOWHERE}
        run_twice = split_nodes.union(*(exit_.below for exit_ in waiting)) if self.leads_back else ()
        unhooked = [(number, name) for number in sorted(run_twice) for name in saved_names(self.types[number])]
        return Structure(
            received=self.received,
            roots=self.roots,
            types=self.types,
            edges=self.edges,
            weight_groups=self._weight_groups(waiting),
            immediate=sorted(immediate),
            freeable=self._freeable(split_nodes) if split_nodes else [],
            unhooked=unhooked,
        )

    def _number(self, node: Any) -> int:
        if node is None:
            return _NOWHERE
        number = self._numbers.setdefault(node, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def _above(self, start: Iterable[int]) -> set[int]:
        found = set(start)
        todo = list(found)
        while todo:
            for parent in self.parents[todo.pop()]:
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def _below(self, start: int) -> set[int]:
        found = {start}
        todo = [start]
        while todo:
            for child, _ in self.edges[todo.pop()]:
                if child not in found and child in self.leads_to_leaf:
                    found.add(child)
                    todo.append(child)
        return found

    def _waits(self, number: int) -> bool:
        return number in self.leads_to_leaf and number not in self.leads_back

    def _exits(self) -> list[_Exit]:
        places = [(n, child) for n in sorted(self.leads_back) for child, _ in self.edges[n] if self._waits(child)]
        places += [(_NOWHERE, root) for root, _ in self.roots if self._waits(root)]
        exits = []
        for split_node, child in dict.fromkeys(places):
            below = self._below(child)
            exits.append(_Exit(split_node, child, below, {number for number in below if self.is_leaf[number]}))
        return exits

    def _immediate(self, exits: list[_Exit]) -> set[int]:
        if not self.leads_back:
            return set()
        if any(node_type.__name__ == _COMPILED for node_type in self.types):
            return set[int]().union(*(exit_.leaves for exit_ in exits))
        immediate: set[int] = set()
        for exit_ in exits:
            if self._must_run_once(exit_) or any(self._sum_is_reordered(number) for number in exit_.below):
                immediate |= exit_.leaves
        # All nodes behind an exit run together, or some would run twice.
        growing = True
        while growing:
            growing = False
            for exit_ in exits:
                if exit_.leaves & immediate and not exit_.leaves <= immediate:
                    immediate |= exit_.leaves
                    growing = True
        return immediate

    def _must_run_once(self, exit_: _Exit) -> bool:
        run = set(exit_.below)
        if exit_.split_node != _NOWHERE:
            run.add(exit_.split_node)
            name = self.types[exit_.split_node].__name__
            if name in AT_ONCE or name == _UNKNOWN or _is_whole_function(self.nodes[exit_.split_node]):
                return True
        return any(is_hooked(self.nodes[n], saved) for n in run for saved in saved_names(self.types[n]))

    def _sum_is_reordered(self, number: int) -> bool:
        """Return whether a sum of gradients from ``R`` and from behind it would change its order here."""
        from_outside = sum(parent not in self.leads_back for parent in self.parents[number])
        direct = len(self.parents[number]) - from_outside + sum(root == number for root, _ in self.roots)
        return direct > 0 and from_outside > 0 and direct + from_outside > 2

    def _weight_groups(self, exits: list[_Exit]) -> list[WeightGroup]:
        """Parts without a common node, in the order of the backward, joined while they are small."""
        weight_groups: list[WeightGroup] = []
        size = _BYTES_AT_ONCE
        for part in sorted(_parts(exits), key=self._order):
            leaves = set[int]().union(*(exit_.leaves for exit_ in part))
            added = sum(self.nodes[leaf].variable.nbytes for leaf in leaves)
            if size + added > _BYTES_AT_ONCE:
                weight_groups.append(WeightGroup())
                size = 0
            size += added
            weight_groups[-1].split_nodes += self._split_nodes(part)
            outside = {exit_.child for exit_ in part if exit_.split_node == _NOWHERE}
            weight_groups[-1].roots += [position for position, (root, _) in enumerate(self.roots) if root in outside]
        for group in weight_groups:
            group.split_nodes.sort(key=lambda split_node: -sequence_number(self.nodes[split_node.node]))
        return weight_groups

    def _order(self, part: list[_Exit]) -> int:
        numbers = [exit_.child if exit_.split_node == _NOWHERE else exit_.split_node for exit_ in part]
        return -max(int(sequence_number(self.nodes[number])) for number in numbers)

    def _split_nodes(self, part: list[_Exit]) -> list[SplitNode]:
        children: dict[int, set[int]] = {}
        for exit_ in part:
            if exit_.split_node != _NOWHERE:
                children.setdefault(exit_.split_node, set()).add(exit_.child)
        return [
            SplitNode(node, [(i, edge) for i, edge in enumerate(self.edges[node]) if edge[0] in wanted])
            for node, wanted in children.items()
        ]

    def _freeable(self, split_nodes: set[int]) -> list[tuple[int, str]]:
        kept = {_storage(saved.data) for n in split_nodes for _, saved in self._saved(n)}
        return [
            (number, name)
            for number in sorted(self.leads_back - split_nodes)
            for name in dict.fromkeys(name for name, saved in self._saved(number) if _storage(saved.data) not in kept)
        ]

    def _saved(self, number: int) -> list[tuple[str, Any]]:
        found = []
        for name in saved_names(self.types[number]):
            for saved in saved_tensors(self.nodes[number], name):
                if unpack_hook(saved) is None and isinstance(saved.data, torch.Tensor):
                    large = saved.data.layout != torch.strided or saved.data.nbytes >= _WORTH_FREEING
                    if large and not isinstance(saved.data, nn.Parameter):
                        found.append((name, saved))
        return found


def _is_whole_function(node: Any) -> bool:
    """Return whether a node is a Python ``autograd.Function`` that may not run once for each of its gradients."""
    return isinstance(node, BackwardCFunction) and not getattr(node, "computes_each_gradient_alone", False)


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else memory_of(tensor)


def _parts(exits: list[_Exit]) -> list[list[_Exit]]:
    """The exits in groups: exits of one node, and exits with common nodes behind them, are in one group."""
    parts: list[tuple[set[int], list[_Exit]]] = []
    for exit_ in exits:
        below, members = exit_.below | ({exit_.split_node} - {_NOWHERE}), [exit_]
        apart: list[tuple[set[int], list[_Exit]]] = []
        for others, theirs in parts:
            if others.isdisjoint(below):
                apart.append((others, theirs))
            else:
                below |= others
                members = theirs + members
        parts = [*apart, (below, members)]
    return [members for _, members in parts]
