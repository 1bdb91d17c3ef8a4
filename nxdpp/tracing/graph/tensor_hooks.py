"""Hooks of gradients that the spine registers on a traced value: ``hidden.register_hook(function)``.

The hook is a node on the stage that makes the value, also where later stages use it. Autograd has added up all
gradients of the value when it runs the hook, also the gradients of later stages.
"""

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from nxdpp.tracing.graph.calls import OpaqueCall, has_proxy, record_opaque_call
from nxdpp.tracing.graph.checks import run_in_every_step
from nxdpp.tracing.state.object_state import content_of


def with_hook(value: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Register ``hook`` on ``value``, and return ``value``."""
    value.register_hook(hook)
    return value


def registers_hook(node: fx.Node) -> bool:
    """Return whether ``node`` registers a hook on a value, and so stays on its stage."""
    return isinstance(node.target, OpaqueCall) and node.target.function is with_hook


def hook_method(owner: fx.Proxy) -> Callable[[Callable[[torch.Tensor], Any]], "HookHandle"]:
    """``register_hook`` of a traced value, for each step; ``RuntimeError`` for a hook that holds traced values."""

    def register(hook: Callable[[torch.Tensor], Any]) -> HookHandle:
        if _holds_proxy(hook):
            tracer: Any = owner.tracer
            raise tracer.refused(
                RuntimeError(
                    f"a hook on {owner.node.name} uses other values of forward, which are those of the trace. Register "
                    f"it in a module of its own, which takes both values and returns the first one."
                )
            )
        owner.node = record_opaque_call(with_hook, (owner, hook), {}).node
        run_in_every_step(owner.node)
        return HookHandle()

    return register


class HookHandle:
    """The handle of a hook that each step registers anew, on new tensors."""

    def remove(self) -> None:
        """Raise ``RuntimeError``: there is nothing to remove between steps."""
        raise RuntimeError(
            "a hook that forward registers on a value is registered anew in each step, and ends with it. Leave "
            "remove() out; a switch that the hook reads can turn it off."
        )


def _holds_proxy(hook: Any) -> bool:
    if isinstance(hook, MethodType):
        hook = hook.__func__
    if isinstance(hook, functools.partial):
        return has_proxy(hook.args, hook.keywords) or _holds_proxy(hook.func)
    if not isinstance(hook, FunctionType):
        return False
    cells = [content_of(cell) for cell in hook.__closure__ or ()]
    return has_proxy([*cells, *(hook.__defaults__ or ())], hook.__kwdefaults__ or {})
