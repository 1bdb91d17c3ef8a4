"""Which part of a stage's autograd graph leads to received values, and which only to parameters.

``R`` is the set of nodes from which a received value can be reached. A *boundary* node is in ``R`` and has edges
that leave it and lead to leaves. What lies behind them makes gradients of parameters only and can wait: it
needs the gradients that the boundary node was given, and what the node saved.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import _FunctionBase
from torch.autograd.graph import GradientEdge

# One call of these makes the gradients of all inputs, whatever was asked for (torchgen's derivatives.yaml: several
# gradients from one formula without a mask, and kernels that take a mask but need all the work for any part of it).
_AT_ONCE = (
    "CudnnAttentionForward", "CudnnRnn", "EfficientAttentionForward", "EuclideanDist",
    "FakeQuantizeLearnablePerChannelAffine", "FakeQuantizeLearnablePerTensorAffine", "FlashAttentionForward",
    "GridSampler2D", "GridSampler2DCpuFallback", "GridSampler3D", "CudnnGridSampler", "IndexReduce", "ConvTbc",
    "LinearBackward", "LinalgEig", "LinalgEigh", "LinalgHouseholderProduct", "LinalgQr", "LinalgSlogdet",
    "LinalgSvd", "LstmMps", "MiopenRnn", "MkldnnRnnLayer", "Polar", "PreluKernel",
    "ScaledDotProductCudnnAttention", "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFusedAttentionOverrideable", "ScatterReduce",
    "ThnnFusedGruCell", "ThnnFusedLstmCell", "WeightNormInterface",
)  # fmt: skip
AT_ONCE = frozenset(f"{name}Backward0" for name in _AT_ONCE)
# Nodes without a Python type of their own are extensions', of which nothing is known.
_UNKNOWN = "CppFunction"
_LEAF = "AccumulateGrad"
_NOWHERE = -1

# Letting go of a smaller saved tensor costs more time than its memory is worth.
_WORTH_DROPPING = 1 << 16
# Gradients of about so many bytes are made before they are added to those of the parameters.
_BYTES_AT_ONCE = 1 << 26

Link = tuple[int, int]


@dataclass(frozen=True)
class Boundary:
    """A node to run again for its other gradients: ``takes`` has (position among its gradients, edge) of each."""

    node: int
    takes: list[tuple[int, Link]]


@dataclass
class Chunk:
    """Gradients of parameters that are made together: by ``boundaries``, and from ``roots`` outside of ``R``."""

    leaves: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)


@dataclass(frozen=True)
class Structure:
    """A graph's shape, with nodes as numbers: received values first, then roots, then as they were met.

    ``immediate`` are leaves whose gradient cannot wait. ``droppable`` are (node, name) of saved tensors that nothing
    uses once the input-gradients are made, ``unhooked`` those that must not come out of hooks.
    """

    arrivals: int
    roots: list[Link]
    kinds: list[Any]
    links: list[list[Link]]
    chunks: list[Chunk]
    immediate: list[int]
    droppable: list[tuple[int, str]]
    unhooked: list[tuple[int, str]]

    def match(self, arrivals: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> list[Any] | None:
        """The nodes of another graph in the same order, or ``None`` where it is not exactly of this shape.

        Every node and every edge is compared: nothing less would notice another path to a parameter. So are the
        order in which nodes run, and which saved tensors come out of hooks.
        """
        nodes: list[Any] = list(dict.fromkeys(edge.node for edge in arrivals))
        known = len(nodes)
        if known != self.arrivals or len(roots) != len(self.roots):
            return None
        for root, (expected, position) in zip(roots, self.roots, strict=True):
            if root.output_nr != position:
                return None
            if expected == known:
                nodes.append(root.node)
                known += 1
            elif nodes[expected] is not root.node:
                return None
        kinds, all_links = self.kinds, self.links
        # The list grows while it is walked.
        for number, node in enumerate(nodes):
            if type(node) is not kinds[number]:
                return None
            if number < self.arrivals:
                continue
            edges = node.next_functions
            links = all_links[number]
            if len(edges) != len(links):
                return None
            for (child, output), (expected, expected_output) in zip(edges, links):  # noqa: B905
                if output != expected_output:
                    return None
                if expected == known:
                    if child is None:
                        return None
                    nodes.append(child)
                    known += 1
                elif (nodes[expected] if expected >= 0 else None) is not child:
                    return None
        # A node that was met twice where two were expected.
        if known != len(kinds) or len(set(nodes)) != known or not self._in_order(nodes):
            return None
        for number, name in self.unhooked:
            if is_hooked(nodes[number], name):
                return None
        return nodes

    def _in_order(self, nodes: Sequence[Any]) -> bool:
        return all(
            nodes[one.node]._sequence_nr() >= nodes[other.node]._sequence_nr()
            for chunk in self.chunks
            for one, other in zip(chunk.boundaries, chunk.boundaries[1:], strict=False)
        )


class BackwardAnalysis:
    """Keeps the analysis of the last graph, for the next of the same shape. One belongs to a program and signature.

    Holds no node and no tensor. ``analyses`` counts the graphs that had to be analysed.
    """

    def __init__(self) -> None:
        self.analyses = 0
        self._last: Structure | None = None

    def of(self, arrivals: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> tuple[Structure, list[Any]]:
        """The structure of the graph between ``roots`` and ``arrivals``, and its nodes."""
        if self._last is not None:
            nodes = self._last.match(arrivals, roots)
            if nodes is not None:
                return self._last, nodes
        self.analyses += 1
        self._last, nodes = analyse(arrivals, roots)
        return self._last, nodes


def is_hooked(node: Any, name: str) -> bool:
    """Whether a saved tensor comes out of a hook, which may compute it anew (activation checkpointing does)."""
    return any(saved.unpack_hook is not None for saved in saved_tensors(node, name))


def saved_tensors(node: Any, name: str) -> Sequence[Any]:
    """The ``SavedTensor`` objects under the attribute ``name`` of a node."""
    found = getattr(node, name)
    if found is None:
        return ()
    return found if isinstance(found, (tuple, list)) else (found,)


_SAVED_NAMES: dict[type, list[str]] = {}


def saved_names(kind: type) -> list[str]:
    """The attributes of a kind of node that hold ``SavedTensor`` objects."""
    if kind not in _SAVED_NAMES:
        _SAVED_NAMES[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return _SAVED_NAMES[kind]


def analyse(arrivals: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> tuple[Structure, list[Any]]:
    """Walk the graph from ``roots`` as far as ``arrivals`` and leaves."""
    graph = _Graph(arrivals, roots)
    return graph.structure(), graph.nodes


@dataclass
class _Entry:
    """Where gradients leave ``R``: from node ``boundary`` (or a root outside, -1) into ``child``."""

    boundary: int
    child: int
    below: set[int]
    leaves: set[int]


class _Graph:
    def __init__(self, arrivals: Sequence[GradientEdge], roots: Sequence[GradientEdge]) -> None:
        self.nodes: list[Any] = list(dict.fromkeys(edge.node for edge in arrivals))
        self.arrivals = len(self.nodes)
        self._numbers: dict[Any, int] = {node: number for number, node in enumerate(self.nodes)}
        self.roots = [(self._number(root.node), root.output_nr) for root in roots]
        self.links: list[list[Link]] = [[] for _ in range(self.arrivals)]
        number = self.arrivals
        while number < len(self.nodes):
            self.links.append([(self._number(child), output) for child, output in self.nodes[number].next_functions])
            number += 1
        self.kinds = [type(node) for node in self.nodes]
        self.parents: list[list[int]] = [[] for _ in self.nodes]
        for number, links in enumerate(self.links):
            for child, _ in links:
                if child != _NOWHERE:
                    self.parents[child].append(number)
        met = {child for links in self.links for child, _ in links} | {number for number, _ in self.roots}
        self.leads_back = self._above(number for number in range(self.arrivals) if number in met)
        self.is_leaf = [n >= self.arrivals and kind.__name__ == _LEAF for n, kind in enumerate(self.kinds)]
        self.leads_to_leaf = self._above(number for number, leaf in enumerate(self.is_leaf) if leaf)

    def structure(self) -> Structure:
        entries = self._entries()
        immediate = self._immediate(entries)
        waiting = [entry for entry in entries if not entry.leaves & immediate]
        boundaries = {entry.boundary for entry in waiting if entry.boundary != _NOWHERE}
        run_twice = boundaries.union(*(entry.below for entry in waiting)) if self.leads_back else ()
        unhooked = [(number, name) for number in sorted(run_twice) for name in saved_names(self.kinds[number])]
        return Structure(
            arrivals=self.arrivals,
            roots=self.roots,
            kinds=self.kinds,
            links=self.links,
            chunks=self._chunks(waiting),
            immediate=sorted(immediate),
            droppable=self._droppable(boundaries) if boundaries else [],
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
            for child, _ in self.links[todo.pop()]:
                if child not in found and child in self.leads_to_leaf:
                    found.add(child)
                    todo.append(child)
        return found

    def _waits(self, number: int) -> bool:
        return number in self.leads_to_leaf and number not in self.leads_back

    def _entries(self) -> list[_Entry]:
        places = [(n, child) for n in sorted(self.leads_back) for child, _ in self.links[n] if self._waits(child)]
        places += [(_NOWHERE, root) for root, _ in self.roots if self._waits(root)]
        entries = []
        for boundary, child in dict.fromkeys(places):
            below = self._below(child)
            entries.append(_Entry(boundary, child, below, {number for number in below if self.is_leaf[number]}))
        return entries

    def _immediate(self, entries: list[_Entry]) -> set[int]:
        if not self.leads_back:
            return set()
        immediate: set[int] = set()
        for entry in entries:
            if self._must_run_once(entry) or any(self._sum_is_reordered(number) for number in entry.below):
                immediate |= entry.leaves
        # What lies behind an entry runs as one, or its nodes would run twice.
        growing = True
        while growing:
            growing = False
            for entry in entries:
                if entry.leaves & immediate and not entry.leaves <= immediate:
                    immediate |= entry.leaves
                    growing = True
        return immediate

    def _must_run_once(self, entry: _Entry) -> bool:
        run = set(entry.below)
        if entry.boundary != _NOWHERE:
            run.add(entry.boundary)
            kind = self.kinds[entry.boundary]
            if issubclass(kind, _FunctionBase) or kind.__name__ in AT_ONCE or kind.__name__ == _UNKNOWN:
                return True
        return any(is_hooked(self.nodes[n], name) for n in run for name in saved_names(self.kinds[n]))

    def _sum_is_reordered(self, number: int) -> bool:
        """Whether gradients from ``R`` and from behind it meet here, which then come in another order."""
        from_outside = sum(parent not in self.leads_back for parent in self.parents[number])
        direct = len(self.parents[number]) - from_outside + sum(root == number for root, _ in self.roots)
        return direct > 0 and from_outside > 0 and direct + from_outside > 2

    def _chunks(self, entries: list[_Entry]) -> list[Chunk]:
        """Parts that share no node, in the order in which backward meets them, joined while they are small."""
        chunks: list[Chunk] = []
        size = _BYTES_AT_ONCE
        for part in sorted(_parts(entries), key=self._order):
            leaves = sorted(set[int]().union(*(entry.leaves for entry in part)))
            added = sum(self.nodes[leaf].variable.nbytes for leaf in leaves)
            if size + added > _BYTES_AT_ONCE:
                chunks.append(Chunk())
                size = 0
            size += added
            chunks[-1].leaves += leaves
            chunks[-1].boundaries += self._boundaries(part)
            outside = {entry.child for entry in part if entry.boundary == _NOWHERE}
            chunks[-1].roots += [position for position, (root, _) in enumerate(self.roots) if root in outside]
        for chunk in chunks:
            chunk.boundaries.sort(key=lambda boundary: -self.nodes[boundary.node]._sequence_nr())
        return chunks

    def _order(self, part: list[_Entry]) -> int:
        numbers = [entry.child if entry.boundary == _NOWHERE else entry.boundary for entry in part]
        return -max(int(self.nodes[number]._sequence_nr()) for number in numbers)

    def _boundaries(self, part: list[_Entry]) -> list[Boundary]:
        children: dict[int, set[int]] = {}
        for entry in part:
            if entry.boundary != _NOWHERE:
                children.setdefault(entry.boundary, set()).add(entry.child)
        return [
            Boundary(node, [(i, link) for i, link in enumerate(self.links[node]) if link[0] in wanted])
            for node, wanted in children.items()
        ]

    def _droppable(self, boundaries: set[int]) -> list[tuple[int, str]]:
        kept = {_storage(saved.data) for n in boundaries for _, saved in self._saved(n)}
        return [
            (number, name)
            for number in sorted(self.leads_back - boundaries)
            for name in dict.fromkeys(name for name, saved in self._saved(number) if _storage(saved.data) not in kept)
        ]

    def _saved(self, number: int) -> list[tuple[str, Any]]:
        found = []
        for name in saved_names(self.kinds[number]):
            for saved in saved_tensors(self.nodes[number], name):
                if saved.unpack_hook is None and isinstance(saved.data, torch.Tensor):
                    large = saved.data.layout != torch.strided or saved.data.nbytes >= _WORTH_DROPPING
                    if large and not isinstance(saved.data, nn.Parameter):
                        found.append((name, saved))
        return found


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()


def _parts(entries: list[_Entry]) -> list[list[_Entry]]:
    """The entries, together where they leave the same node or what lies behind them meets."""
    parts: list[tuple[set[int], list[_Entry]]] = []
    for entry in entries:
        below, members = entry.below | ({entry.boundary} - {_NOWHERE}), [entry]
        apart: list[tuple[set[int], list[_Entry]]] = []
        for others, theirs in parts:
            if others.isdisjoint(below):
                apart.append((others, theirs))
            else:
                below |= others
                members = theirs + members
        parts = [*apart, (below, members)]
    return [members for _, members in parts]
