"""The part that only CUDA has: why a machine that promises a GPU shows none. Only this file names ``torch.cuda``."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.cuda.amp.common import amp_definitely_not_available

# Variables with which a user hides all devices, by these values; torch for ROCm reads the second and third too.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDDEN = ("", "-1")
# Variables by which a launcher promises devices.
_PROMISES = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia/version")
_PCI_DEVICES = "/sys/bus/pci/devices"
# PCI vendors NVIDIA and AMD, and the PCI class of displays and accelerators.
_VENDORS = ("0x10de", "0x1002")
_CLASSES = ("0x03", "0x12")


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
    for name in _VISIBLE if torch.version.hip else _VISIBLE[:1]:
        if os.environ.get(name) in _HIDDEN:
            return CudaProbe(0, absent=f"{name} hides all devices")
    count = torch.cuda.device_count()
    if count:
        return CudaProbe(count)
    built = f"torch is built for CUDA {torch.version.cuda or torch.version.hip}"
    signs = _signs()
    if not signs:
        return CudaProbe(0, absent=f"{built}, and this machine shows no GPU", is_chosen=False)
    return CudaProbe(0, problem=f"{built}, {' and '.join(signs)}, and no device can be used: {_reason()}")


def has_no_autocast() -> bool:
    """Return whether torch switches off a block of autocast for CUDA."""
    return bool(amp_definitely_not_available())


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
