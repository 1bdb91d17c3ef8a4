"""Memory of a rank's device on this machine, of its host and of its process."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from nxdpp.devices import accelerator
from nxdpp.devices.kinds import has_streams, kind_of

_GROUPS = Path("/sys/fs/cgroup")


def device_memory() -> int:
    """Return the bytes of memory of an accelerator; without one, each rank's equal part of the host's.

    The rank has the device of its ``LOCAL_RANK``, or the first where fewer are visible. The number of ranks of the host
    is ``LOCAL_WORLD_SIZE``, 1 without it.
    """
    kind = accelerator.present()
    if kind is not None and kind_of(kind).backend != "gloo":
        local_rank = int(os.environ.get("LOCAL_RANK") or 0)
        return accelerator.total_memory(torch.device(kind, local_rank if local_rank < accelerator.count(kind) else 0))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory so far: allocated on an accelerator ``device``, else resident of this process."""
    if has_streams(device.type):
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError):
        # The figure of resource.getrusage begins with the parent's.
        found = re.search(rb"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_bytes())
        if found is not None:
            return int(found[1]) << 10
    import resource

    # macOS counts bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def free_host_memory() -> int:
    """Return the bytes of the host's memory that all its processes together can still take; 0 where it is unknown.

    The limits of the control groups of this process, as of a container or a job of Slurm, count.
    """
    with suppress(OSError):
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        if found is not None:
            return max(0, min([int(found[1]) << 10, *_free_in_groups()]))
    return 0


def _free_in_groups() -> Iterator[int]:
    """The bytes that each control group with a limit has left; pages of files give way."""
    with suppress(OSError):
        own = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        folder = _GROUPS / (own[1].strip("/") if own is not None else "")
        for group in (folder, *folder.parents):
            limit, current, statistics = (group / f"memory.{name}" for name in ("max", "current", "stat"))
            if limit.is_file() and limit.read_text().strip().isdecimal():
                files = re.search(r"^inactive_file (\d+)$", statistics.read_text(), re.MULTILINE)
                yield int(limit.read_text()) - int(current.read_text()) + (int(files[1]) if files is not None else 0)
