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

_MACHINERY = ("torch.", "nxdpp.")


class ParameterOfModel(nn.Parameter):
    """A parameter for code of the spine, with the device of an input. It shares the memory of ``own``."""

    own: nn.Parameter
    traced_device: Any

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The traced device of the first input."""
        return self.traced_device


@contextmanager
def devices_of_inputs(first_input: fx.Proxy | None) -> Iterator[None]:
    """Let ``parameters()`` and ``named_parameters()`` give parameters with the device of ``first_input``, to the spine.

    Code of torch gets the parameters themselves.
    """
    if first_input is None:
        yield
        return
    original, thread, device = nn.Module.named_parameters, threading.get_ident(), first_input.device

    def shown(parameter: nn.Parameter) -> nn.Parameter:
        made: Any = torch.Tensor._make_subclass(ParameterOfModel, parameter, parameter.requires_grad)
        made.own, made.traced_device = parameter, device
        return made  # type: ignore[no-any-return]

    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        frame = sys._getframe(1)
        named = original(self, *args, **kwargs)
        if threading.get_ident() != thread or f"{frame.f_globals.get('__name__')}.".startswith(_MACHINERY):
            return named
        return ((name, shown(parameter)) for name, parameter in named)

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        frame = sys._getframe(1)
        named = original(self, recurse=recurse)
        if threading.get_ident() != thread or f"{frame.f_globals.get('__name__')}.".startswith(_MACHINERY):
            return (parameter for _, parameter in named)
        return (shown(parameter) for _, parameter in named)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "named_parameters", named_parameters))
        stack.enter_context(patch.object(nn.Module, "parameters", parameters))
        yield
