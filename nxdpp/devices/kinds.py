"""The table of device types, by their names in torch. A type that is not in it is an accelerator."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from nxdpp.devices.accelerator import Accelerator
from nxdpp.devices.device import Device
from nxdpp.devices.xla import XlaDevice
from nxdpp.ground.torch_names import STORAGE_ADDRESS, STORAGE_USES


class Kind(NamedTuple):
    """The class and the backend of a type of device.

    Attributes:
        interface: the class of its devices.
        backend: the backend of ``torch.distributed`` that sends its tensors. Gloo sends copies in host memory.
    """

    interface: type[Device]
    backend: str


KINDS = {
    "cpu": Kind(Device, "gloo"),
    "meta": Kind(Device, "gloo"),
    # The backend "xla" has collectives of its own kind.
    "xla": Kind(XlaDevice, "gloo"),
}


_ACCELERATOR = Kind(Accelerator, "gloo")


def kind_of(name: str) -> Kind:
    """Return what is known of the device type ``name``, such as ``"cuda"``, ``"xpu"`` or another package's.

    An accelerator has the backend that torch, or the package of the type, has registered for it, else gloo.
    """
    own = dist.Backend.default_device_backend_map.get(name, "gloo")
    return KINDS.get(name) or _ACCELERATOR._replace(backend=own)


def has_streams(name: str) -> bool:
    """Return whether devices of the type ``name`` run behind the host's calls: neither the CPU, nor XLA's records."""
    return name not in KINDS


def device_of(device: torch.device) -> Device:
    """Return the interface of ``device``."""
    return KINDS.get(device.type, _ACCELERATOR).interface(device)


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
