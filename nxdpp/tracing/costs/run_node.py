"""Runs of single nodes of a traced graph, forward and backward, each node by itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nxdpp.ground.torch_names import FORWARD_HOOKS, FORWARD_PRE_HOOKS, STORAGE_ADDRESS
from nxdpp.tracing.graph.modes import applied, modes_of
from nxdpp.tracing.models.captured_outputs import captured_for_cost, ends_capture
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import flatten, leaves_of, map_leaves


@dataclass(frozen=True)
class NodeRun:
    """Node with its module and its arguments. Gradients end at the tensors among the arguments."""

    node: fx.Node
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    def forward(self) -> Any:
        """Run the node in its modes of torch and return its value."""
        with applied(modes_of(self.node)):
            if self.node.op == "call_module":
                assert self.module is not None
                return self.module(*self.args, **self.kwargs)
            if self.node.op == "call_method":
                return getattr(self.args[0], str(self.node.target))(*self.args[1:], **self.kwargs)
            if ends_capture(self.node):
                return captured_for_cost(*self.args)
            assert callable(self.node.target)
            return self.node.target(*self.args, **self.kwargs)


def run_of(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> NodeRun:
    """Return the run of ``node`` on ``values``, whose tensors become leaves of the autograd graph."""
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: map_tensors(detached, values[source]))
    return NodeRun(node, module, args, kwargs)


def backward(run: NodeRun, value: Any, gradient_like: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Run the backward of the tensors in ``value``, which ``run`` returned, that need gradients."""
    ends = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    if ends:
        with outer_gradients_kept(run, [get_gradient_edge(end) for end in ends]):
            torch.autograd.backward(ends, [gradient_like(end) for end in ends])


@contextmanager
def outer_gradients_kept(run: NodeRun, edges: list[GradientEdge]) -> Iterator[None]:
    """Keep the gradients of tensors that the function of ``run`` reads besides its arguments, such as a closure's.

    The backward begins at ``edges``. A module's parameters are a copy, and their gradients are counted.
    """
    if run.module is not None:
        yield
        return
    leaves = [node.variable for node in graph_nodes(edges) if hasattr(node, "variable")]
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def graph_nodes(edges: list[GradientEdge]) -> list[Any]:
    """Return the nodes behind ``edges``; each before the nodes that it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(edge.node, False) for edge in edges]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions)
    return order[::-1]


def initial_value(node: fx.Node, root: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the input or the attribute of ``root`` that ``node`` reads."""
    if node.op == "placeholder":
        return inputs[str(node.target)]
    owner, _, name = str(node.target).rpartition(".")
    return getattr(root.get_submodule(owner), name)


def cost_key(run: NodeRun) -> Any:
    """Return a key that runs of equal cost share: classes, hooks and parameters of the module, specs of the arguments.

    Return ``None`` without parameters. The node is then cheap, and its cost may depend on values.
    """
    if run.module is None or next(listings.parameters(run.module), None) is None:
        return None
    leaves, structure = flatten((run.args, run.kwargs))
    arguments = tuple(_spec(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    modules = tuple(
        (name, type(module), module.training, _hooks(module)) for name, module in listings.named_modules(run.module)
    )
    parameters = tuple((name, _spec(parameter)) for name, parameter in listings.named_parameters(run.module))
    return modules, parameters, arguments, str(structure), modes_of(run.node)


def _hooks(module: nn.Module) -> tuple[str, ...]:
    """Names of the functions that run before and after ``module``."""
    hooks = (*FORWARD_PRE_HOOKS.of(module).values(), *FORWARD_HOOKS.of(module).values())
    return tuple(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same memory share while one of them lives."""
    return int(STORAGE_ADDRESS.of(tensor.untyped_storage()))


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of the autograd graph with the memory of ``tensor``."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _spec(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
