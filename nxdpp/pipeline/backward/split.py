"""Backward of one microbatch in two calls: gradients of received values first, gradients of parameters later.

This is the split of zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241). No
product is computed twice: autograd's operations compute the gradient of each input separately, and only the
gradients that the engine asks for. The first call asks for the gradients on the way to received values. The second
call runs the split nodes again for their other gradients, and then the nodes behind them. It runs no other node twice.

Between the calls the gradients at operations with parameters stay in memory, and so do the tensors that these
operations saved. The graph's nodes stay too. Of the other saved tensors only small ones stay.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import setitem
from threading import local
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nxdpp.counted import counted
from nxdpp.ground.torch_names import BACKWARD_HOOKS
from nxdpp.pipeline.backward.graph import BackwardAnalysis
from nxdpp.pipeline.backward.run import run_backward
from nxdpp.pipeline.backward.structure import Structure, WeightGroup, saved_tensors

_Gradients = tuple[torch.Tensor | None, ...]

# Note: views under a split backward
#
# The input-gradients end where received tensors enter the graph, and the weight-gradients begin at nodes that have run
# already. Both need nodes to be named before and found afterwards, while a layer may do what it likes with the tensor.
#
# A received tensor is not a leaf (`ReceivedTensor`): layers may change it in place, which torch forbids for leaves that
# require a gradient. A change in place, of the tensor or of a view of it, gives the tensor another `grad_fn`:
#
#     entered = _Enter(received)      edge of the entry: (_Enter, 0)
#     view = entered[:, :4]
#     view.mul_(2)                    entered.grad_fn is CopySlices now, and leads to _Enter
#
# So the edge is taken when the tensor enters. An edge of `entered` taken after the forward would end the backward at
# CopySlices, without the factor 2: a wrong gradient without an error. For the same reason roots are edges, taken as
# soon as the forward has ended, and not tensors whose history a later action might change.
#
# The Python object of a custom Function's node does not keep the node alive, and the graph may be gone by the time of
# the weight-gradients. `entered.view_as(entered).grad_fn`, of a view that nobody reads, is a node of C++ behind it: it
# owns the node, and no activation (`_InFlight.kept`). torch's `get_gradient_edge` has it as its ownership token.
#
# A node runs again for its weights only while autograd's engine wants exactly these gradients: a node asks the engine
# which of its outputs are needed, and computes all where none runs. Hence a backward of `_ANCHOR`, whose hook calls the
# nodes: that is a run of the engine which wants the edges of the weights, and reaches none of them by itself.

# A leaf whose hook calls what its thread asks for; made once, since that takes as long as a small operation.
_asked = local()
with torch.inference_mode(mode=False), torch.enable_grad():
    _ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
    _ANCHOR.register_hook(lambda gradient: _asked.function(gradient))
    _ANCHOR_EDGE = get_gradient_edge(_ANCHOR)
    _ZERO = torch.zeros((), device="cpu")


@dataclass
class _GroupWork:
    """The remaining work of a weight group: start at ``roots``, and run ``split_nodes`` for their other edges."""

    roots: list[GradientEdge]
    gradients: list[torch.Tensor]
    split_nodes: deque[tuple[Any, _Gradients, list[tuple[int, GradientEdge]]]]


class SplitBackward:
    """The backward of one microbatch of one stage; make it after the forward.

    The gradients equal one plain backward's bit for bit, when each kind of call is made in the order of the
    microbatches. They are added to ``.grad``, and the hooks of the parameters run. Some parameters' gradients cannot
    wait, and :meth:`input_gradients` computes them:

    - gradients of an operation that computes all at once: a fused attention, a Python ``autograd.Function``
      unless its forward sets ``ctx.computes_each_gradient_alone = True``;
    - gradients in a region under saved-tensor hooks (``torch.utils.checkpoint``): it would be recomputed a second time;
    - all gradients of a stage with modules that ``torch.compile`` has compiled: their backward overwrites what it has
      saved.

    When the graph depends on the data, a parameter may be immediate in one microbatch and not in another. Its sum then
    has the order of the calls.

    Hooks of tensors run once. A hook of a graph node (``grad_fn.register_hook``) at an operation with parameters sees
    the gradients of the first call only. Both calls must be on the stream of the forward.

    Args:
        analysis: one for all microbatches of a stage and a signature.
        received: the edges at which received values enter the graph (``get_gradient_edge``); the backward ends there.
        roots: the tensors, or their edges, at which the backward starts. Tensors are not kept alive.
    """

    def __init__(
        self, analysis: BackwardAnalysis, received: Sequence[GradientEdge], roots: Sequence[torch.Tensor | GradientEdge]
    ) -> None:
        self._received = list(received)
        self._roots = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        self._structure: Structure | None
        self._structure, self._nodes = analysis.of(self._received, self._roots)
        self._work: deque[_GroupWork] | None = None

    def input_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Compute the gradients of received values; ``None`` for a value that the roots do not depend on.

        Args:
            gradients: the roots' gradients, of their shapes, dtypes and devices. Their memory must not change before
                :meth:`weight_gradients`.

        Raises:
            ValueError: when there are not as many gradients as roots.
            RuntimeError: when called a second time.
        """
        structure = self._structure
        if structure is None:
            raise RuntimeError("the input-gradients of this microbatch have been computed already")
        if len(gradients) != len(self._roots):
            raise ValueError(
                f"{counted(len(self._roots), 'root needs', 'roots need')} as many gradients, not {len(gradients)}"
            )
        starts = list(gradients)
        # Run the graph, and keep the gradients that the split nodes are given.
        kept: dict[int, _Gradients] = {}
        hooks = [
            self._nodes[split_node.node].register_prehook(partial(setitem, kept, split_node.node))
            for group in structure.weight_groups
            for split_node in group.split_nodes
        ]
        immediate = [GradientEdge(self._nodes[leaf], 0) for leaf in structure.immediate]
        found = self._run_first(starts, [*self._received, *immediate], retain=bool(hooks))
        # A hook keeps ``kept`` alive, and with it memory.
        for hook in hooks:
            hook.remove()
        # Plan the weight-gradients, and free all that they do not need.
        self._work = deque(self._plan(group, starts, kept) for group in structure.weight_groups)
        _free_saved(structure, self._nodes)
        count = len(self._received)
        self._structure, self._nodes, self._roots, self._received = None, [], [], []
        _accumulate(immediate, found[count:])
        return found[:count]

    def weight_gradients(self) -> None:
        """Add the gradients of the deferred parameters to their ``.grad``, and free the graph.

        Raises:
            RuntimeError: before :meth:`input_gradients`, or when called a second time.
        """
        if self._work is None:
            raise RuntimeError("weight_gradients follows input_gradients, once")
        work, self._work = self._work, None
        while work:
            group = work.popleft()
            roots, gradients = group.roots, group.gradients
            if group.split_nodes:
                _run_split_nodes(group.split_nodes, roots, gradients)
            if roots:
                run_backward(roots, gradients)

    def _run_first(
        self, starts: list[torch.Tensor], inputs: list[GradientEdge], retain: bool
    ) -> list[torch.Tensor | None]:
        if not inputs or not starts:
            return [None] * len(inputs)
        return list(run_backward(self._roots, starts, inputs, retain=retain, accumulate=False))

    def _plan(self, group: WeightGroup, starts: list[torch.Tensor], kept: dict[int, _Gradients]) -> _GroupWork:
        nodes = self._nodes
        return _GroupWork(
            roots=[self._roots[position] for position in group.roots],
            gradients=[starts[position] for position in group.roots],
            split_nodes=deque(
                (
                    nodes[split_node.node],
                    kept.pop(split_node.node),
                    [(place, GradientEdge(nodes[child], output)) for place, (child, output) in split_node.takes],
                )
                for split_node in group.split_nodes
                if split_node.node in kept
            ),
        )


def _run_split_nodes(
    split_nodes: deque[tuple[Any, _Gradients, list[tuple[int, GradientEdge]]]],
    roots: list[GradientEdge],
    gradients: list[torch.Tensor],
) -> None:
    """Run ``split_nodes``; add the edges behind them, with their gradients, to ``roots`` and ``gradients``."""
    wanted = [edge for _, _, takes in split_nodes for _, edge in takes]

    def run_nodes(_: torch.Tensor) -> None:
        while split_nodes:
            node, given, takes = split_nodes.popleft()
            # A Python function's node is not callable.
            made = node(*given) if callable(node) else node.apply(*given)
            for place, edge in takes:
                gradient = made[place] if isinstance(made, tuple) else made
                if gradient is not None:
                    roots.append(edge)
                    gradients.append(gradient)

    _run_while_asking_for(wanted, run_nodes)


def _run_while_asking_for(edges: list[GradientEdge], function: Callable[[torch.Tensor], None]) -> None:
    """Call ``function`` while autograd's engine wants the gradients of ``edges``: nodes then compute no other ones."""
    # A node that runs may have a split backward of its own.
    outer = getattr(_asked, "function", None)
    _asked.function = function
    try:
        run_backward([_ANCHOR_EDGE], [_ZERO], [_ANCHOR_EDGE, *edges], retain=True, accumulate=False)
    finally:
        _asked.function = outer


def _accumulate(leaves: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add ``gradients`` to the leaves' ``.grad`` as autograd's engine does."""
    known = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    if not known:
        return
    # The first call has run the hooks of the tensors; the hooks of their accumulation still have to run.
    variables: list[Any] = [leaf.node.variable for leaf, _ in known]  # type: ignore[attr-defined]  # of torch's AccumulateGrad
    hooks = [BACKWARD_HOOKS.of(variable) for variable in variables if BACKWARD_HOOKS.of(variable)]
    kept = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    try:
        # ``gradients`` keeps the tensors alive, so autograd copies them and does not use their memory for ``.grad``.
        run_backward(
            [leaf for leaf, _ in known], [gradient for _, gradient in known], (), retain=False, accumulate=True
        )
    finally:
        for found, those in zip(hooks, kept, strict=True):
            found.update(those)


def _free_saved(structure: Structure, nodes: Sequence[Any]) -> None:
    """Free saved tensors that only the input-gradients needed."""
    for number, name in structure.freeable:
        for saved in saved_tensors(nodes[number], name):
            # Packing into nothing is the only way to make autograd free a tensor. Autograd refuses when the node has
            # no tensor, or when a hook holds it.
            with suppress(RuntimeError):
                saved.register_hooks(_pack_nothing, _unpack_nothing)


def _pack_nothing(tensor: torch.Tensor) -> None:
    return None


def _unpack_nothing(packed: None) -> torch.Tensor:
    raise RuntimeError("this part of the graph has been run")
