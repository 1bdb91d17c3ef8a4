"""Values of which several stages have copies: a change in place on one stage would be missing on the others.

::

    stage 0                     stage 1                         stage 2
    hidden = layer(x) ────────▶ layer(hidden)   hidden += 1
           └──────────────────────────────────────────────────▶ other(hidden)      without the 1

In one process there is one tensor. Here a change is noticed, by the version that torch counts, and refused.
"""

from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing.containers import leaves_of
from nxdpp.tracing.errors import model_line


def versions(value: Any) -> tuple[int, ...]:
    """How often each tensor of ``value`` has been changed in place."""
    leaves = (value,) if isinstance(value, torch.Tensor) else leaves_of(value)
    return tuple(-1 if t.is_inference() else t._version for t in leaves if isinstance(t, torch.Tensor))


def expect_unchanged(value: Any, before: tuple[int, ...], name: str, where: str = "") -> None:
    """Raise ``RuntimeError`` where a tensor of ``value`` has been changed in place since it had these versions."""
    if versions(value) != before:
        raise RuntimeError(
            f"the value {name}, of which several stages have copies, is changed in place on this one{where}; the "
            f"others would not see it. Have the module that does so change a copy (hidden = hidden + ..., "
            f"hidden.clone()), or cut so that all that use the value are on one stage (pipeline_cuts)."
        )


class _Buffers:
    """The buffers of a module that several stages run, and how often each has been changed."""

    __name__ = "buffers"

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> list[tuple[str, torch.Tensor, tuple[int, ...]]]:
        return [(name, buffer, versions(buffer)) for name, buffer in self._module.named_buffers()]


def expect_same_buffers(
    before: list[tuple[str, torch.Tensor, tuple[int, ...]]],
    now: list[tuple[str, torch.Tensor, tuple[int, ...]]],
    module: str,
) -> None:
    """Raise ``RuntimeError`` where a buffer of ``module`` has been changed or replaced."""
    for (name, old, version), (_, new, current) in zip(before, now, strict=True):
        if old is not new or version != current:
            raise RuntimeError(
                f"{module}.forward changes its buffer {name}, and {module} runs on several stages, each with a copy. "
                f"It has to run on one: use a module for each place, or cut elsewhere (pipeline_cuts)."
            )


class Watch:
    """Adds to a stage's graph the checks of values that other stages have copies of."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._begun: list[tuple[fx.Node, fx.Node, str, str]] = []
        self._buffers: list[tuple[_Buffers, fx.Node, str]] = []

    def begin_buffers(self, module: nn.Module, name: str) -> None:
        """From here on the buffers of the module must not change."""
        buffers = _Buffers(module)
        self._buffers.append((buffers, self._graph.call_function(buffers), name))

    def begin(self, copy: fx.Node, original: fx.Node, user: fx.Node | None = None) -> None:
        """From here on the value must not change; ``user`` is the node of the model that runs next, if only that."""
        before = self._graph.call_function(versions, (copy,))
        where = f" by {user.target}, at {model_line(user.stack_trace)}" if user is not None else ""
        self._begun.append((copy, before, original.name, where))

    def end(self) -> None:
        """Check all values since their ``begin``."""
        for copy, before, name, where in self._begun:
            self._graph.call_function(expect_unchanged, (copy, before, name, where))
        for buffers, before, name in self._buffers:
            self._graph.call_function(expect_same_buffers, (before, self._graph.call_function(buffers), name))
        self._begun, self._buffers = [], []


def may_change_arguments(node: fx.Node, root: nn.Module) -> bool:
    """Whether running ``node`` may change its arguments in place: a module does what it likes."""
    if node.op == "call_module":
        modules = list(root.get_submodule(str(node.target)).modules())
        plain = all(type(module).__module__.startswith("torch.nn.modules.") for module in modules)
        return not plain or any(getattr(module, "inplace", False) for module in modules)
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and not getattr(node.target, "__module__", "").startswith(("torch", "_operator"))
