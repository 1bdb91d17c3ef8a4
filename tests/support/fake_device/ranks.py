"""A rank of a test on the fake accelerator: ``python -m pytest --device fake``.

The device is the default one of the rank, so the models, inputs and references that a test makes there are on it. A
result is in host memory when it goes back to the test.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from tests.support.fake_device.device_module import install


def call(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Call ``function`` with the fake accelerator as the default device; return its pickled result."""
    install()
    torch.set_default_device("fake")
    args = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("fake"), args)
    with _HostGenerators():
        result = function(rank, *args)
    torch.accelerator.synchronize()
    written = io.BytesIO()
    _HostPickler(written).dump(result)
    return written.getvalue()


class _HostGenerators(TorchFunctionMode):
    """Draw on the host what a test draws from a generator of the host, and copy it to the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        is_drawn = generator is not None and generator.device.type == "cpu" and func in _device_constructors()
        if not is_drawn or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to("fake")


class _HostPickler(pickle.Pickler):
    """Pickler that writes tensors of the device as host tensors."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "fake":
            return NotImplemented
        host = value.detach().cpu()
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(host, value.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return host.requires_grad_(value.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
