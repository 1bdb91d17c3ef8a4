"""Collectives of device tensors over gloo, by way of host memory.

gloo takes tensors in host memory. A device tensor may come back from it unchanged, without an error.

::

    program     start bucket 0 ─▶ start bucket 1 ─▶ ...                              wait ─▶ copy back
    device          └─ copy 0 ─┐      └─ copy 1 ─┐
    thread                     └─▶ pack, begin 0 └─▶ pack, begin 1
    gloo                                └─ all-reduce 0 ─┴─ all-reduce 1 ─▶
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.devices.daemon_thread import DaemonThread
from nxdpp.devices.host_sends import HostWork as HostWork
from nxdpp.devices.kinds import device_of, kind_of
from nxdpp.ranks.group_getters import local_device


def needs_host(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Return whether ``tensor`` must be copied to host memory before ``group`` sends it."""
    return tensor.device.type != "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def wire_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """Return the device of the tensors that ``group`` sends for ``device``."""
    return torch.device("cpu") if dist.get_backend(group) == dist.Backend.GLOO else device


def on_wire(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return ``tensor``, or its copy where ``group`` can send it: in host memory, or on this rank's device."""
    if needs_host(tensor, group):
        return device_of(tensor.device).to_host(tensor)()
    own = local_device()
    # Rows that ``CPUOffloadPolicy`` keeps in host memory, and what is computed from them. gloo sends these as they are.
    is_of_device = dist.Backend.GLOO != dist.get_backend(group) == kind_of(own.type).backend
    is_behind = tensor.device.type == "cpu" != own.type and is_of_device
    return tensor.to(own) if is_behind else tensor


def from_wire(message: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``message`` on ``device``: itself, or a copy if it is in host memory for a group that needs that."""
    return message if message.device == device else device_of(device).from_host(message)


def in_place(tensor: torch.Tensor, group: ProcessGroup, collective: Callable[[torch.Tensor], object]) -> None:
    """Make ``collective``, which waits and changes its tensor, change ``tensor``."""
    message = on_wire(tensor, group)
    collective(message)
    if message is not tensor:
        with torch.no_grad():
            device_of(tensor.device).fill(tensor, message)


def begin_on_host(
    tensors: Sequence[torch.Tensor], collective: Callable[[list[torch.Tensor]], dist.Work | None]
) -> HostWork:
    """Start to copy ``tensors`` of one device to host memory, and begin ``collective`` of the copies in a thread.

    Collectives begin in the order of the calls. Before a collective of its own over the same group, a rank calls
    ``wait_begun``: ranks that begin two in different orders would give each the other's values. ``tensors`` are not
    changed before the collective is finished; there may be none. ``collective`` returns the work in flight.
    """
    copied = device_of(tensors[0].device).to_host_together(tensors) if tensors else list

    @torch.no_grad()
    def begin() -> tuple[dist.Work, None]:
        work = collective(copied())
        assert work is not None, "collectives in flight have a work"
        return work, None

    return HostWork(_thread().submit(begin))


@cache
def _thread() -> DaemonThread:
    """The thread that begins collectives."""
    return DaemonThread("collectives of host copies")
