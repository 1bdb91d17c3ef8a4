"""XLA devices, by way of torch_xla. This file alone names ``torch_xla``.

An operation on an XLA tensor is only recorded. ``submit`` compiles all recorded operations into one graph, or finds it
compiled, and starts it. A value that the host asks for earlier compiles a graph of its own, and the operations before
it run again in the next graph. So each action of a schedule ends with ``submit``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from nxdpp.devices.device import Device


class XlaDevice(Device):
    """An XLA device. A stamp is a time of the host: torch_xla has no events."""

    @property
    def is_lazy(self) -> bool:
        """``True``: XLA records operations."""
        return True

    def submit(self) -> None:
        """Start all recorded operations, and wait for none of them; compiles a graph at its first time."""
        _torch_xla().sync()

    def synchronize(self) -> None:
        """Start all recorded operations, and wait until the device is idle."""
        self.submit()
        _xla_model().wait_device_ops()

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start all recorded operations, and copy ``tensor`` in a thread; the result waits for the copy."""
        self.submit()
        return _copies().submit(tensor.detach().cpu).result

    def memory_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage object that a tensor shares with its views: it has no address."""
        return int(tensor.untyped_storage()._cdata)

    def random_state(self) -> bytes:
        """Return the state of the device's generator: a number of 64 bits."""
        return int(_xla_model().get_rng_state()).to_bytes(8, "little", signed=True)

    def set_random_state(self, state: bytes) -> None:
        """Set the state of the device's generator."""
        _xla_model().set_rng_state(int.from_bytes(state, "little", signed=True))


def start() -> torch.device:
    """Start XLA's device of this process, and return it."""
    device: torch.device = _torch_xla().device()
    return device


def _torch_xla() -> Any:
    import torch_xla

    return torch_xla


def _xla_model() -> Any:
    from torch_xla.core import xla_model

    return xla_model


@cache
def _copies() -> ThreadPoolExecutor:
    """The thread that copies to the host, in the order of the calls."""
    return ThreadPoolExecutor(1, "copies to the host")
