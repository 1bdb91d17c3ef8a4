"""Guard of values with copies on several stages: an in-place change on one stage would be missing on the others.

::

    stage 0                     stage 1                         stage 2
    hidden = layer(x) ────────▶ layer(hidden)   hidden += 1
           └──────────────────────────────────────────────────▶ other(hidden)      without the 1

One process has one tensor. Here the guard finds a change by torch's version counters, and refuses it.
"""

from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing import listings
from nxdpp.tracing.errors import model_line
from nxdpp.tracing.nested import leaves_of


def versions(value: Any) -> tuple[int, ...]:
    """Return the number of in-place changes of each tensor of ``value``."""
    leaves = (value,) if isinstance(value, torch.Tensor) else leaves_of(value)
    return tuple(-1 if t.is_inference() else t._version for t in leaves if isinstance(t, torch.Tensor))


def expect_unchanged(value: Any, before: tuple[int, ...], name: str, where: str = "") -> None:
    """Raise ``RuntimeError`` for a tensor of ``value`` that changed in place since it had the versions ``before``."""
    if versions(value) != before:
        raise RuntimeError(
            f"the value {name}, of which several stages have copies, is changed in place on this one{where}; the "
            f"others would not see it. Change a copy in that module (hidden = hidden + ..., hidden.clone()), or cut so "
            f"that one stage has all users of the value (pipeline_cuts)."
        )


class _Buffers:
    """The buffers of a module that several stages run, each with its versions."""

    __name__ = "buffers"

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> list[tuple[str, torch.Tensor, tuple[int, ...]]]:
        return [(name, buffer, versions(buffer)) for name, buffer in listings.named_buffers(self._module)]


def expect_same_buffers(
    before: list[tuple[str, torch.Tensor, tuple[int, ...]]],
    now: list[tuple[str, torch.Tensor, tuple[int, ...]]],
    module: str,
) -> None:
    """Raise ``RuntimeError`` for a changed, replaced, new or removed buffer of ``module``."""
    old, new = ({name: (id(buffer), version) for name, buffer, version in found} for found in (before, now))
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            raise RuntimeError(
                f"{module}.forward changes its buffer {name}, and {module} runs on several stages, each with a copy. "
                f"It must run on one stage: use one module for each place, or cut elsewhere (pipeline_cuts). If the "
                f"buffer is a table that the first run fills, run the model once before wrapping it, with inputs of "
                f"the greatest length."
            )


class Guard:
    """Adds checks to a stage's graph, for values with copies on other stages."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._begun: list[tuple[fx.Node, fx.Node, str, str]] = []
        self._buffers: list[tuple[_Buffers, fx.Node, str]] = []

    def begin_buffers(self, module: nn.Module, name: str) -> None:
        """Guard the buffers of ``module`` from here on."""
        buffers = _Buffers(module)
        self._buffers.append((buffers, self._graph.call_function(buffers), name))

    def begin(self, copy: fx.Node, original: fx.Node, user: fx.Node | None = None) -> None:
        """Guard the value from here on, or around the next node of the model, ``user``."""
        before = self._graph.call_function(versions, (copy,))
        where = f" by {user.target}, at {model_line(user.stack_trace)}" if user is not None else ""
        self._begun.append((copy, before, original.name, where))

    def end(self) -> None:
        """Check all guarded values."""
        for copy, before, name, where in self._begun:
            self._graph.call_function(expect_unchanged, (copy, before, name, where))
        for buffers, before, name in self._buffers:
            self._graph.call_function(expect_same_buffers, (before, self._graph.call_function(buffers), name))
        self._begun, self._buffers = [], []


def may_change_arguments(node: fx.Node, root: nn.Module) -> bool:
    """Return whether ``node`` may change its arguments in place. Modules other than torch's may."""
    if node.op == "call_module":
        modules = list(listings.modules(root.get_submodule(str(node.target))))
        plain = all(type(module).__module__.startswith("torch.nn.modules.") for module in modules)
        return not plain or any(getattr(module, "inplace", False) for module in modules)
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    # A function that is made by ``exec`` may have no Python module.
    source = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and not source.startswith(("torch", "_operator"))
