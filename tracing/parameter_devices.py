"""Devices of parameters that code of the spine asks for: ``torch.arange(n, device=next(self.parameters()).device)``.

A rank has only some of the parameters; the others are on the meta device. So the answer is the device of the first
input, on every rank.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

_MACHINERY = ("torch.", "nxdpp.")


class ParameterOfModel(nn.Parameter):
    """A parameter for code of the spine, with the device of an input. It shares the memory of ``own``."""

    own: nn.Parameter
    traced_device: Any
    is_detached: bool

    @property
    def device(self) -> Any:  # type: ignore[override]  # a proxy in the place of a device
        """The traced device of the first input."""
        return self.traced_device

    @property
    def data(self) -> Any:
        """The same memory, which code must not change either."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise _refusal()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``function`` on the parameters. Raise ``RuntimeError`` for one that changes its argument in place."""
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            raise _refusal()
        if name == "detach":
            return shown(args[0].own, args[0].traced_device, detached=True)
        own_args, own_kwargs = pytree.tree_map_only(ParameterOfModel, _own, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*own_args, **own_kwargs)


def _own(shown_parameter: ParameterOfModel) -> torch.Tensor:
    own = shown_parameter.own
    return own.detach() if shown_parameter.is_detached else own


def shown(parameter: nn.Parameter, device: Any, detached: bool = False) -> ParameterOfModel:
    """Return ``parameter`` for code of the spine, with the traced ``device`` of an input."""
    requires_grad = parameter.requires_grad and not detached
    made: ParameterOfModel = torch.Tensor._make_subclass(ParameterOfModel, parameter, requires_grad)
    made.own, made.traced_device, made.is_detached = parameter, device, detached
    return made


def _refusal() -> RuntimeError:
    return RuntimeError(
        "forward changes a parameter outside the transformer layers; the trace would change it, and no step. Change it "
        "between steps on each rank (wrapped.local_named_parameters()), or in the forward of a module without layers, "
        "which runs as one node."
    )


@contextmanager
def devices_of_inputs(first_input: fx.Proxy | None) -> Iterator[None]:
    """Let ``parameters()`` and ``named_parameters()`` give parameters with the device of ``first_input``, to the spine.

    Code of torch gets the parameters themselves.
    """
    if first_input is None:
        yield
        return
    original, thread, device = nn.Module.named_parameters, threading.get_ident(), first_input.device

    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        frame = sys._getframe(1)
        named = original(self, *args, **kwargs)
        if threading.get_ident() != thread or f"{frame.f_globals.get('__name__')}.".startswith(_MACHINERY):
            return named
        return ((name, shown(parameter, device)) for name, parameter in named)

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        frame = sys._getframe(1)
        named = original(self, recurse=recurse)
        if threading.get_ident() != thread or f"{frame.f_globals.get('__name__')}.".startswith(_MACHINERY):
            return (parameter for _, parameter in named)
        return (shown(parameter, device) for _, parameter in named)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "named_parameters", named_parameters))
        stack.enter_context(patch.object(nn.Module, "parameters", parameters))
        yield
