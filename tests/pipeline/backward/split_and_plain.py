"""Split backward and plain backward of a module, over several microbatches."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.pipeline.backward import graph
from nxdpp.pipeline.backward.graph import BackwardAnalysis
from nxdpp.pipeline.backward.run import ReceivedTensor
from nxdpp.pipeline.backward.split import SplitBackward

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "_grouped_mm", "attention", "embedding_dense_backward")


class CountProducts(TorchDispatchMode):
    """Counts the calls of matrix products, convolutions and attentions, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _PRODUCTS or any(part in name for part in ("convolution_backward", "attention", "embedding_dense")):
            self.counts[name] += 1
        result = func(*args, **(kwargs or {}))
        if name == "convolution_backward":
            # It counts once for each wanted gradient.
            self.counts[name] += sum(args[-1]) - 1
        return result


@dataclass
class Run:
    """Results of a backward: gradients of the received tensors of each microbatch, of parameters; counts."""

    received: list[list[torch.Tensor | None]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor | None] = field(default_factory=dict)
    products: Counter[str] = field(default_factory=Counter)
    weight_products: int = 0
    analyses: int = 0


@dataclass
class Microbatch:
    """One forward of received values through a module."""

    received: list[ReceivedTensor]
    edges: list[GradientEdge]
    roots: list[torch.Tensor]
    gradients: list[torch.Tensor]


Forward = Callable[[Any, Sequence[torch.Tensor]], Any]


def forward(module: Any, values: Sequence[torch.Tensor], run: Forward, seed: int) -> Microbatch:
    received, edges, entered = [], [], []
    for value in values:
        if value.is_floating_point():
            received.append(ReceivedTensor(value.clone()))
            entered.append(received[-1].enter_graph())
            edges.append(get_gradient_edge(entered[-1]))
        else:
            entered.append(value)
    torch.manual_seed(seed)
    outputs = run(module, entered)
    found = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in found]
    return Microbatch(received, edges, found, gradients)


def plain(module: nn.Module, batches: Sequence[Sequence[torch.Tensor]], run: Forward) -> Run:
    result = Run()
    counter = CountProducts()
    for number, values in enumerate(batches):
        microbatch = forward(module, values, run, number)
        with counter:
            if microbatch.roots:
                torch.autograd.backward(microbatch.roots, microbatch.gradients)
        result.received.append([tensor.gradient for tensor in microbatch.received])
    result.products = counter.counts
    result.parameters = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    return result


def split(
    module: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
    run: Forward,
    delay: int = 2,
) -> Run:
    """Backward as in a zero-bubble schedule, with ``delay`` microbatches between the two calls."""
    result, analysis = Run(), BackwardAnalysis()
    counter, later = CountProducts(), CountProducts()
    waiting: list[SplitBackward] = []
    for number, values in enumerate(batches):
        microbatch = forward(module, values, run, number)
        backward = SplitBackward(analysis, microbatch.edges, microbatch.roots)
        microbatch.roots = []
        with counter:
            result.received.append(backward.input_gradients(microbatch.gradients))
        waiting.append(backward)
        if len(waiting) > delay:
            with later:
                waiting.pop(0).weight_gradients()
    with later:
        for backward in waiting:
            backward.weight_gradients()
    result.products = counter.counts + later.counts
    result.weight_products = later.counts.total()
    result.parameters = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    return result


def call(module: Any, values: Sequence[torch.Tensor]) -> Any:
    return module(*values)


def compare(module: nn.Module, batches: Sequence[Sequence[torch.Tensor]], run: Forward = call, **options: Any) -> Run:
    """Check that both backwards give the same bits with the same work; return the split run."""
    # A copy has no gradients yet.
    module, twin = copy.deepcopy(module), copy.deepcopy(module)
    expected = plain(twin, batches, run)
    with mock.patch.object(graph, "analyse", wraps=graph.analyse) as analyse:
        found = split(module, batches, run, **options)
    found.analyses = analyse.call_count
    for number, (ours, theirs) in enumerate(zip(found.received, expected.received, strict=True)):
        for position, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert same(our, their), f"received tensor {position} of microbatch {number}"
    for name, gradient in expected.parameters.items():
        assert same(found.parameters[name], gradient), name
    assert found.products == expected.products
    return found


def same(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs)
