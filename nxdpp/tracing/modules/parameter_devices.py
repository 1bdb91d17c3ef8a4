"""Devices of parameters that code of the spine asks for: ``torch.arange(n, device=next(self.parameters()).device)``.

A rank has only some of the parameters; the others are on the meta device. So the answer is the device of the first
input, on every rank. Tensors that code makes like a parameter (``weight.new_zeros(())``) are on that device too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import FUNCTIONAL_CALL, pytree
from nxdpp.tracing.code.frames import caller, module_of
from nxdpp.tracing.graph.swap import in_this_thread
from nxdpp.tracing.values.metadata import LIKE
from nxdpp.tracing.values.type_answers import reads_parameter

_MACHINERY = ("torch.", "nxdpp.")


class ParameterOfModel(nn.Parameter):
    """A parameter for code of the spine, with the device of an input. It shares the memory of ``own``."""

    own: nn.Parameter
    traced_device: Any
    is_detached: bool

    @property
    def device(self) -> Any:  # type: ignore[override]  # a proxy in place of a device
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
        return torch.Tensor.__torch_function__(function, (), own_args, own_kwargs)  # type: ignore[no-untyped-call]


def _own(shown_parameter: ParameterOfModel) -> torch.Tensor:
    own = shown_parameter.own
    return own.detach() if shown_parameter.is_detached else own


def shown(parameter: nn.Parameter, device: Any, detached: bool = False) -> ParameterOfModel:
    """Return ``parameter`` for code of the spine, with the traced ``device`` of an input."""
    if isinstance(parameter, ParameterOfModel):
        return parameter
    # A DTensor can be no other subclass. Only ``own`` is ever computed with.
    plain: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    made = plain.detach().as_subclass(ParameterOfModel)
    made.own, made.traced_device, made.is_detached = parameter, device, detached
    return made


def _refusal() -> RuntimeError:
    return RuntimeError(
        "forward changes a parameter outside the transformer layers; the trace would change it, and no step. Change it "
        "between steps on each rank (wrapped.local_named_parameters()), or in the forward of a module without layers, "
        "which runs as one node. Where it follows a parameter of another stage (the target of BYOL, an average), first "
        "make one layer of both modules, so that one rank has both parameters."
    )


def on_device_of_input(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first_input: fx.Proxy
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node that makes a tensor like a parameter, with the device of ``first_input``.

    A node of a different kind keeps its arguments.
    """
    if target == "to" and len(args) == 2 and not kwargs and _is_parameter(args[1]):
        return (args[0], first_input.device, args[1].dtype), kwargs
    makes = target in LIKE or (isinstance(target, str) and target.startswith("new_"))
    if makes and args and "device" not in kwargs and _is_parameter(args[0]):
        return args, {**kwargs, "device": first_input.device}
    return args, kwargs


def _is_parameter(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy) and reads_parameter(value)


@contextmanager
def devices_of_inputs(first_input: fx.Proxy | None) -> Iterator[None]:
    """Let ``parameters()`` and ``named_parameters()`` give parameters with the device of ``first_input``, to the spine.

    Code of torch gets the parameters themselves.
    """
    if first_input is None:
        yield
        return
    device = first_input.device

    def in_the_spine(original: Callable[..., Any], show: Callable[[Any], Any]) -> Any:
        def listed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            found = original(*args, **kwargs)
            return found if f"{module_of(caller(1))}.".startswith(_MACHINERY) else map(show, found)

        return in_this_thread(listed, original)

    named = in_the_spine(nn.Module.named_parameters, lambda item: (item[0], shown(item[1], device)))
    plain = in_the_spine(nn.Module.parameters, lambda parameter: shown(parameter, device))
    with patch.object(nn.Module, "named_parameters", named), patch.object(nn.Module, "parameters", plain):
        yield


@contextmanager
def refused_functional_calls() -> Iterator[None]:
    """Refuse calls of modules with other parameters or buffers than their own.

    The node of a module has only the module's name, so each step would run it with its own. Raises ``RuntimeError``.
    """
    if FUNCTIONAL_CALL.warn_if_gone():
        yield
        return

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"functional_call runs {type(module).__name__} outside the transformer layers with parameters that it is "
            f"given; a stage would run it with its own. Move the call into the forward of a layer, or of a module "
            f"without layers, which runs as one node."
        )

    before = FUNCTIONAL_CALL.replace(in_this_thread(call, FUNCTIONAL_CALL.found))
    try:
        yield
    finally:
        FUNCTIONAL_CALL.replace(before)
