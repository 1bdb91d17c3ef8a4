"""Collectives of device tensors over gloo, by way of host memory.

gloo takes tensors in host memory. A device tensor may come back from it unchanged, without an error.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.devices.kinds import device_of


def needs_host(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Return whether ``tensor`` must be copied to host memory before ``group`` sends it."""
    return tensor.device.type != "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def on_wire(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return ``tensor``, or its copy in host memory if ``group`` needs that."""
    return device_of(tensor.device).to_host(tensor)() if needs_host(tensor, group) else tensor


def in_place(tensor: torch.Tensor, group: ProcessGroup, collective: Callable[[torch.Tensor], object]) -> None:
    """Make ``collective``, which waits and changes its tensor, change ``tensor``."""
    message = on_wire(tensor, group)
    collective(message)
    if message is not tensor:
        with torch.no_grad():
            tensor.copy_(device_of(tensor.device).from_host(message))
