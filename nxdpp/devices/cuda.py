"""CUDA devices. Only this file names ``torch.cuda``."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.cuda.amp.common import amp_definitely_not_available

from nxdpp.devices.device import Device, Stamp

# Values of CUDA_VISIBLE_DEVICES with which a user hides all devices.
_HIDDEN = ("", "-1")
# Variables by which a launcher promises devices.
_PROMISES = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia/version")
_PCI_DEVICES = "/sys/bus/pci/devices"
# PCI vendors NVIDIA and AMD, and the PCI class of displays and accelerators.
_VENDORS = ("0x10de", "0x1002")
_CLASSES = ("0x03", "0x12")


class CudaDevice(Device):
    """A CUDA device. A stamp is an event in the current stream."""

    def stamp(self) -> Stamp:
        """Return an event that gets its time when the device reaches it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Stamp, end: Stamp) -> int:
        """Return the nanoseconds from one event to a later one; wait until the device has reached the later one."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return round(1e6 * milliseconds)

    def origin(self) -> tuple[Stamp, int]:
        """Return an event and its ``time.perf_counter_ns``; wait until the device is idle."""
        self.synchronize()
        stamp = self.stamp()
        stamp.synchronize()
        return stamp, time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy by way of pinned memory: a copy from other memory waits for the work before it."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to copy into pinned memory. The result waits for the work before the copy, not for the whole device."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def copied() -> torch.Tensor:
            event.synchronize()
            return pinned

        return copied

    def fill(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Give ``tensor`` the values of ``host`` by way of pinned memory."""
        tensor.copy_(self.from_host(host))

    def as_current(self) -> AbstractContextManager[Any]:
        """Make it the current device of a thread in the block."""
        return torch.cuda.device(self.device)

    def random_state(self) -> bytes:
        """Return the state of the device's generator."""
        return torch.cuda.get_rng_state(self.device).numpy().tobytes()

    def set_random_state(self, state: bytes) -> None:
        """Set the state of the device's generator."""
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), self.device)

    def seeded_state(self, number: int) -> bytes:
        """Return the state of the device's generator after ``number`` has seeded it."""
        return torch.Generator(self.device).manual_seed(number).get_state().numpy().tobytes()


@dataclass(frozen=True)
class CudaProbe:
    """CUDA as this process finds it.

    Attributes:
        count: number of visible devices.
        absent: the reason why there is no device to expect; ``None`` if there is one.
        problem: the reason why expected devices cannot be used; ``None`` if they can.
        is_chosen: ``False`` where devices are absent, and no choice of the user says so.
    """

    count: int
    absent: str | None = None
    problem: str | None = None
    is_chosen: bool = True


def find() -> CudaProbe:
    """Return the visible devices, or the reason why there are none; makes no CUDA context."""
    if not torch.backends.cuda.is_built():
        return CudaProbe(0, absent="torch is built without CUDA")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return CudaProbe(0, absent="CUDA_VISIBLE_DEVICES hides all devices")
    count = torch.cuda.device_count()
    if count:
        return CudaProbe(count)
    built = f"torch is built for CUDA {torch.version.cuda or torch.version.hip}"
    signs = _signs()
    if not signs:
        return CudaProbe(0, absent=f"{built}, and this machine shows no GPU", is_chosen=False)
    return CudaProbe(0, problem=f"{built}, {' and '.join(signs)}, and no device can be used: {_reason()}")


def start(device: torch.device) -> str:
    """Make ``device`` the current device, and return its identity; raises ``RuntimeError`` if it cannot be used."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {getattr(properties, 'uuid', device.index)}"


def name(index: int = 0) -> str:
    """Return the name of the device ``index``, such as ``"NVIDIA H100"``."""
    return str(torch.cuda.get_device_name(index))


def total_memory(index: int) -> int:
    """Return the bytes of memory of the device ``index``."""
    return int(torch.cuda.get_device_properties(index).total_memory)


def current_index() -> int:
    """Return the index of the current device."""
    return torch.cuda.current_device()


def has_no_autocast() -> bool:
    """Return whether torch switches off a block of autocast for CUDA."""
    return bool(amp_definitely_not_available())


def functions() -> dict[str, Any]:
    """Return the namespace of ``torch.cuda``, to replace functions in it."""
    return vars(torch.cuda)


def _reason() -> str:
    """Return why CUDA does not start, in one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".")
    return "the driver lists none"


def _signs() -> list[str]:
    """Return what promises a GPU here: variables of a launcher, files of a driver, a PCI device."""
    signs = [f"{name} is {os.environ[name]!r}" for name in _PROMISES if os.environ.get(name)]
    files = [file for file in _DRIVER_FILES if Path(file).exists()]
    if files:
        signs.append(f"{files[0]} exists")
    found = _pci_device()
    if found is not None:
        signs.append(f"PCI device {found} is a GPU")
    return signs


def _pci_device() -> str | None:
    """Return the address of the first GPU on the PCI bus."""
    for folder in sorted(Path(_PCI_DEVICES).glob("*")):
        try:
            vendor, kind = (folder.joinpath(name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor in _VENDORS and kind.startswith(_CLASSES):
            return folder.name
    return None
