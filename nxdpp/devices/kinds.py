"""The kinds of devices, by their type in torch."""

import torch

from nxdpp.devices.cuda import CudaDevice
from nxdpp.devices.device import Device
from nxdpp.devices.xla import XlaDevice
from nxdpp.ground.torch_names import STORAGE_ADDRESS, STORAGE_USES

KINDS: dict[str, type[Device]] = {"cuda": CudaDevice, "xla": XlaDevice}
"""The class of each device type whose work the host must follow. Others are ``Device``."""


def device_of(device: torch.device) -> Device:
    """Return the interface of ``device``."""
    return KINDS.get(device.type, Device)(device)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its copy in host memory on a device where each part to read would be a graph."""
    return device_of(tensor.device).readable(tensor)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one memory share; 0 for no memory."""
    return device_of(tensor.device).memory_of(tensor)


def has_own_memory(gradient: torch.Tensor) -> bool:
    """Return whether no other tensor has the memory of ``gradient``.

    Autograd may use it as the ``.grad`` of a parameter too: of positions that are added to a batch of one row. The
    next microbatch adds to that in place, perhaps before this gradient has been sent.
    """
    storage = gradient.untyped_storage()
    # One of the tensor itself, and one of the storage object.
    return bool(STORAGE_USES(STORAGE_ADDRESS.of(storage)) <= 2)
