"""Guard of values with copies on several stages: an in-place change on one stage would be missing on the others.

::

    stage 0                     stage 1                         stage 2
    hidden = layer(x) ────────▶ layer(hidden)   hidden += 1
           └──────────────────────────────────────────────────▶ other(hidden)      without the 1

One process has one tensor. Here the guard finds a change by torch's version counters, and refuses it.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import VERSION
from nxdpp.tracing.graph.errors import model_line
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import leaves_of


def versions(value: Any) -> tuple[int, ...]:
    """Return the number of in-place changes of each tensor of ``value``."""
    if value is None or isinstance(value, int | float | str):
        return ()
    leaves = (value,) if isinstance(value, torch.Tensor) else value
    # A stage asks for each layer and microbatch: without a call for each tensor.
    if type(leaves) is not tuple or {*map(type, leaves)} != {torch.Tensor}:
        leaves = tuple([leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)])
    if any(map(torch.Tensor.is_inference, leaves)):
        return tuple([-1 if leaf.is_inference() else VERSION.of(leaf) for leaf in leaves])
    return tuple(map(VERSION.of, leaves))


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
        # Of each guarded value: its versions, its name, and the nodes of the model that may change it.
        self._begun: dict[fx.Node, tuple[fx.Node, str, list[fx.Node]]] = {}
        self._buffers: list[tuple[_Buffers, fx.Node, str]] = []

    def begin_buffers(self, module: nn.Module, name: str) -> None:
        """Guard the buffers of ``module`` from here on."""
        buffers = _Buffers(module)
        self._buffers.append((buffers, self._graph.call_function(buffers), name))

    def begin(self, copy: fx.Node, original: fx.Node, user: fx.Node | None = None) -> None:
        """Guard the value until ``end``. ``user`` is the next node of the model, which may change it."""
        if copy not in self._begun:
            self._begun[copy] = self._graph.call_function(versions, (copy,)), original.name, []
        if user is not None:
            self._begun[copy][2].append(user)

    def end(self) -> None:
        """Check all guarded values."""
        for copy, (before, name, users) in self._begun.items():
            self._graph.call_function(expect_unchanged, (copy, before, name, _where(users)))
        for buffers, before, name in self._buffers:
            self._graph.call_function(expect_same_buffers, (before, self._graph.call_function(buffers), name))
        self._begun, self._buffers = {}, []


def _where(users: Sequence[fx.Node]) -> str:
    """The nodes that may have changed a value, for a message."""
    if len(users) > 1:
        return f" by one of {users[0].target} to {users[-1].target}"
    return f" by {users[0].target}, at {model_line(users[0].stack_trace)}" if users else ""


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
    return node.op == "call_function" and not source.startswith(("torch", operator.add.__module__))
