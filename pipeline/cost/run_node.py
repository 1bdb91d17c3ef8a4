"""Runs of single nodes of a traced graph, forward and backward, each node alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing import listings
from nxdpp.tracing.captured_outputs import captured_for_cost, ends_capture
from nxdpp.tracing.modes import applied, modes_of
from nxdpp.tracing.nested import flatten, leaves_of, map_leaves


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
            return self._forward()

    def _forward(self) -> Any:
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


def backward(value: Any, gradient_like: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Run the backward of the tensors in ``value`` that need gradients."""
    ends = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends, [gradient_like(end) for end in ends])


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
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of the autograd graph with the memory of ``tensor``."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _spec(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
