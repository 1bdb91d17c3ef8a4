"""Running the nodes of a traced graph one by one, forward and backward, each alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing.containers import flatten, leaves_of, map_leaves


@dataclass
class NodeRun:
    """A node with its arguments, cut off from the graph that made them: gradients end at ``sources``."""

    node: fx.Node
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    def forward(self) -> Any:
        """What the node gives."""
        if self.node.op == "call_module":
            assert self.module is not None
            return self.module(*self.args, **self.kwargs)
        if self.node.op == "call_method":
            return getattr(self.args[0], str(self.node.target))(*self.args[1:], **self.kwargs)
        assert callable(self.node.target)
        return self.node.target(*self.args, **self.kwargs)


def run_of(node: fx.Node, module: nn.Module | None, values: Mapping[fx.Node, Any]) -> NodeRun:
    """``node`` ready to run on ``values``, whose tensors it takes detached from what made them."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: cut_off(values[argument]))
    return NodeRun(node, module, args, kwargs)


def cut_off(value: Any) -> Any:
    """``value`` with leaves of the autograd graph, of the same memory, in the place of its tensors."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each tensor in it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def signature(run: NodeRun) -> Any:
    """What runs of the same cost share: class and parameters of the module, and the metadata of the arguments.

    ``None`` for a node that runs no module of parameters: such a one is cheap, and may depend on values.
    """
    if run.module is None or not any(True for _ in run.module.parameters()):
        return None
    leaves, structure = flatten((run.args, run.kwargs))
    arguments = tuple(_kind(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    modules = tuple((name, type(module), module.training) for name, module in run.module.named_modules())
    parameters = tuple((name, _kind(parameter)) for name, parameter in run.module.named_parameters())
    return modules, parameters, arguments, str(structure)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
