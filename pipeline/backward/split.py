"""The backward of one microbatch in two calls: gradients of received values now, of parameters later.

The split of zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241). No product is
computed twice: autograd's operations compute the gradients of their inputs each on its own, and only those that
the engine asks for. The first call asks for those on the way to received values. The second runs the operations at
the border again, for the others, and then what lies behind them; it goes through nothing that has been run.

Between the calls live: the gradients at operations with parameters, what these operations saved, and the graph's
nodes without other saved tensors of any size.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nxdpp.pipeline.backward.graph import BackwardAnalysis, Chunk, Structure, saved_tensors
from nxdpp.pipeline.backward.run import run_backward

_Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class _Work:
    """What is left to do of a chunk: start at ``roots``, and run ``boundaries`` for their edges."""

    roots: list[GradientEdge]
    gradients: list[torch.Tensor]
    boundaries: deque[tuple[Any, _Gradients, list[tuple[int, GradientEdge]]]]


class SplitBackward:
    """The backward of one microbatch of one stage, to be made after its forward.

    Gradients are bit for bit those of one plain backward, accumulated in ``.grad`` with the hooks of the parameters,
    where the calls of all microbatches come in the order of the microbatches. Some parameters' gradients cannot
    wait, and are made by :meth:`input_gradients` (``immediate_parameters``): those of an operation that makes all its
    gradients at once (a Python ``autograd.Function``, a fused attention), and those in a region under saved-tensor
    hooks (``torch.utils.checkpoint``), which would be recomputed a second time.

    Where the graph depends on the data, a parameter may be of these in one microbatch and not in another; its sum is
    then in the order of the calls.

    Hooks of tensors run once. A hook of a graph node (``grad_fn.register_hook``) at an operation with parameters sees
    the gradients of the first call only. Both calls belong on the stream of the forward. Not collective, but for what
    the model's own nodes do.

    Args:
        analysis: kept by the caller for all microbatches of one program and signature.
        arrivals: where received values enter the graph (``get_gradient_edge`` of them); the backward ends there.
        roots: what the backward starts from. Tensors are not kept alive.
    """

    def __init__(
        self,
        analysis: BackwardAnalysis,
        arrivals: Sequence[GradientEdge],
        roots: Sequence[torch.Tensor | GradientEdge],
    ) -> None:
        self._arrivals = list(arrivals)
        self._roots = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        self._structure: Structure | None
        self._structure, self._nodes = analysis.of(self._arrivals, self._roots)
        self._work: deque[_Work] | None = None

    @property
    def deferred_parameters(self) -> list[torch.Tensor]:
        """The leaves whose gradients :meth:`weight_gradients` makes; known until :meth:`input_gradients`."""
        return [self._nodes[leaf].variable for chunk in self._before().chunks for leaf in chunk.leaves]

    @property
    def immediate_parameters(self) -> list[torch.Tensor]:
        """The leaves whose gradients :meth:`input_gradients` makes; known until then."""
        return [self._nodes[leaf].variable for leaf in self._before().immediate]

    def input_gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the arrivals; ``None`` for one that the roots do not depend on.

        Args:
            gradients: of the roots, each of its root's shape, dtype and device; ``None`` is one, for a root of
                one element. Their memory must not change before :meth:`weight_gradients`.

        Raises:
            ValueError: for another number of gradients than roots, or ``None`` for a root of several elements.
            RuntimeError: when called a second time.
        """
        structure = self._before()
        if len(gradients) != len(self._roots):
            raise ValueError(f"{len(self._roots)} roots need as many gradients, not {len(gradients)}")
        starts = [_start(root, gradient) for root, gradient in zip(self._roots, gradients, strict=True)]
        kept: dict[int, _Gradients] = {}
        hooks = [
            self._nodes[boundary.node].register_prehook(partial(setitem, kept, boundary.node))
            for chunk in structure.chunks
            for boundary in chunk.boundaries
        ]
        immediate = [GradientEdge(self._nodes[leaf], 0) for leaf in structure.immediate]
        found = self._run_first(starts, [*self._arrivals, *immediate], retain=bool(hooks))
        # A hook of ours holds ``kept``, and through it memory.
        for hook in hooks:
            hook.remove()
        self._work = deque(self._plan(chunk, starts, kept) for chunk in structure.chunks)
        _drop(structure, self._nodes)
        count = len(self._arrivals)
        self._structure, self._nodes, self._roots, self._arrivals = None, [], [], []
        _accumulate(immediate, found[count:])
        return found[:count]

    def weight_gradients(self) -> None:
        """Add the gradients of the other parameters to their ``.grad``, and free the graph.

        Raises:
            RuntimeError: before :meth:`input_gradients`, or when called a second time.
        """
        if self._work is None:
            raise RuntimeError("weight_gradients follows input_gradients, once")
        work, self._work = self._work, None
        while work:
            chunk = work.popleft()
            roots, gradients = chunk.roots, chunk.gradients
            if chunk.boundaries:
                _run_boundaries(chunk.boundaries, roots, gradients)
            if roots:
                run_backward(roots, gradients)

    def _before(self) -> Structure:
        if self._structure is None:
            raise RuntimeError("the input-gradients of this microbatch have been made already")
        return self._structure

    def _run_first(
        self, starts: list[torch.Tensor], inputs: list[GradientEdge], retain: bool
    ) -> list[torch.Tensor | None]:
        if not inputs or not starts:
            return [None] * len(inputs)
        return list(run_backward(self._roots, starts, inputs, retain=retain, accumulate=False))

    def _plan(self, chunk: Chunk, starts: list[torch.Tensor], kept: dict[int, _Gradients]) -> _Work:
        nodes = self._nodes
        return _Work(
            roots=[self._roots[position] for position in chunk.roots],
            gradients=[starts[position] for position in chunk.roots],
            boundaries=deque(
                (
                    nodes[boundary.node],
                    kept.pop(boundary.node),
                    [(place, GradientEdge(nodes[child], output)) for place, (child, output) in boundary.takes],
                )
                for boundary in chunk.boundaries
                if boundary.node in kept
            ),
        )


def _run_boundaries(
    boundaries: deque[tuple[Any, _Gradients, list[tuple[int, GradientEdge]]]],
    roots: list[GradientEdge],
    gradients: list[torch.Tensor],
) -> None:
    """Add the edges behind ``boundaries``, with their gradients, to ``roots`` and ``gradients``."""
    wanted = [edge for _, _, takes in boundaries for _, edge in takes]

    def run_nodes(_: torch.Tensor) -> None:
        while boundaries:
            node, given, takes = boundaries.popleft()
            made = node(*given)
            for place, edge in takes:
                gradient = made[place] if isinstance(made, tuple) else made
                if gradient is not None:
                    roots.append(edge)
                    gradients.append(gradient)

    _run_while_asking_for(wanted, run_nodes)


def _run_while_asking_for(edges: list[GradientEdge], function: Callable[[torch.Tensor], None]) -> None:
    """Call ``function`` while the engine wants gradients of ``edges``: a node called then computes no other ones."""
    anchor = torch.zeros((), requires_grad=True)
    anchor.register_hook(function)
    edge = get_gradient_edge(anchor)
    run_backward([edge], [torch.zeros(())], [edge, *edges], retain=True, accumulate=False)


def _start(root: GradientEdge, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is not None:
        return gradient
    metadata: Any = root.node._input_metadata[root.output_nr]
    shape = torch.Size(metadata.shape)
    if shape.numel() != 1:
        raise ValueError(f"a root of shape {tuple(shape)} needs a gradient; only one element has 1 by default")
    return torch.ones(shape, dtype=metadata.dtype, device=metadata.device)


def _accumulate(leaves: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add to ``.grad`` as the engine does."""
    known = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    if not known:
        return
    # The first call has run the hooks of the tensors already; those of their accumulation are still to come.
    variables: list[Any] = [leaf.node.variable for leaf, _ in known]  # type: ignore[attr-defined]
    hooks = [variable._backward_hooks for variable in variables if variable._backward_hooks]
    kept = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    try:
        # ``gradients`` is still held here: autograd copies instead of making a shared tensor the parameter's own.
        run_backward(
            [leaf for leaf, _ in known], [gradient for _, gradient in known], (), retain=False, accumulate=True
        )
    finally:
        for found, those in zip(hooks, kept, strict=True):
            found.update(those)


def _drop(structure: Structure, nodes: Sequence[Any]) -> None:
    """Let go of saved tensors that only the input-gradients needed."""
    for number, name in structure.droppable:
        for saved in saved_tensors(nodes[number], name):
            # Packing into nothing is the only way to make autograd forget a tensor; it refuses where there is none,
            # or where a hook holds it.
            with suppress(RuntimeError):
                saved.register_hooks(_pack_nothing, _unpack_nothing)


def _pack_nothing(tensor: torch.Tensor) -> None:
    return None


def _unpack_nothing(packed: None) -> torch.Tensor:
    raise RuntimeError("this part of the graph has been run")
