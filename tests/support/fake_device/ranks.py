"""A rank of a test on the fake accelerator: ``python -m pytest --device fake``.

A test's tensors are on the device unless it names another: the ones that it makes in the rank, its arguments, and those
that its modules have made at their import. They have the values that they have on the CPU, from the host's generator.
Layers that draw in a step draw on the device. A result is in host memory when it goes back to the test.
"""

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils import _pytree as pytree

from nxdpp.initialization.recorder import is_recording
from nxdpp.tracing.graph import errors
from tests.support.fake_device.device_module import install

_NAME = "fake"
_DRAW = {torch.rand, torch.randn, torch.randint, torch.randperm}
_FILL = {
    getattr(torch.Tensor, f"{name}_")
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
}
# Functions of torch.nn.init that call the mode, and then draw without it; transformers has its own in their place.
_INITIALISE = ("kaiming_uniform_", "normal_", "uniform_")


def call(rank: int, payload: bytes) -> bytes:
    """Call the pickled function with its arguments; return the pickled result."""
    install()
    function, args = pickle.loads(payload)
    _move_globals()
    args = pytree.tree_map(_moved, args)
    _device.CURRENT_DEVICE = torch.device(_NAME)
    # A sentence names the line of the model, not that of the mode.
    vars(errors)["_MACHINERY"] = (*errors._MACHINERY, __file__)
    with _OnDevice():
        result = function(rank, *args)
    torch.accelerator.synchronize()
    written = io.BytesIO()
    _HostPickler(written).dump(result)
    return written.getvalue()


def _moved(value: Any) -> Any:
    """Return a host tensor as one of the device, and a module on the device; everything else as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.detach().to(_NAME).requires_grad_(value.requires_grad)
    return value.to(_NAME) if isinstance(value, nn.Module) else value


def _move_globals() -> None:
    """Move the tensors of the tests' modules."""
    moved: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for key, value in list(vars(module).items()):
                if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
                    vars(module)[key] = moved.setdefault(id(value), pytree.tree_map(_moved, value))


class _OnDevice(TorchFunctionMode):
    """Make tensors on the device where a test names none; draw their values on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "tensor" in kwargs and getattr(func, "__name__", "") in _INITIALISE:
            if not getattr(kwargs["tensor"], "_is_hf_initialized", False):
                rest = {name: value for name, value in kwargs.items() if name != "tensor"}
                with torch.no_grad():
                    return self._filled(func, kwargs["tensor"], (), rest)
        elif func in _FILL:
            return self._filled(func, args[0], args[1:], kwargs)
        # A default device of the test's own counts, and deferred_init makes no memory.
        is_named = kwargs.get("device") is not None or torch.device(_NAME) != _device.CURRENT_DEVICE
        if func not in _device._device_constructors() or is_named or is_recording():
            return func(*args, **kwargs)
        if func in _DRAW and getattr(kwargs.get("generator"), "device", torch.device("cpu")).type == "cpu":
            return _moved(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **{**kwargs, "device": _NAME})

    def _filled(self, func: Any, tensor: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """Fill ``tensor`` by ``func``, on the host if its generator is the host's."""
        generator = kwargs.get("generator")
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == _NAME
        if not is_plain or (generator is not None and generator.device.type == _NAME):
            filled: torch.Tensor = func(tensor, *args, **kwargs)
            return filled
        host = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return tensor.copy_(func(host, *args, **kwargs))


class _HostPickler(pickle.Pickler):
    """Pickler that writes the device as the CPU, and its tensors as host tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == _NAME:
            return torch.device, ("cpu",)
        if not isinstance(value, torch.Tensor) or value.device.type != _NAME:
            return NotImplemented
        host = value.detach().cpu()
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(host, value.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return host.requires_grad_(value.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
