"""CUDA devices that are not there: ``torch.cuda`` as it answers on other machines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nxdpp.devices import cuda

LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


@dataclass
class FakeCuda:
    """The answers of ``torch.cuda``.

    Attributes:
        visible: number of visible devices.
        built: torch is built with CUDA.
        nccl: torch is built with NCCL.
        broken: devices that cannot be used.
        current: the current device.
    """

    visible: int = 0
    built: bool = True
    nccl: bool = True
    broken: Sequence[int] = ()
    current: int = field(default=0)

    def install(self, patch: pytest.MonkeyPatch) -> "FakeCuda":
        """Replace ``torch.cuda``; no variable of a launcher is set, and this machine shows no GPU."""
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setattr(cuda, "_DRIVER_FILES", ())
        patch.setattr(cuda, "_PCI_DEVICES", "/nowhere")
        patch.setattr(torch.backends.cuda, "is_built", lambda: self.built)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "device_count", lambda: self.visible)
        patch.setattr(torch.cuda, "init", self._init)
        patch.setattr(torch.cuda, "is_available", lambda: self.visible > 0)
        patch.setattr(torch.accelerator, "set_device_index", self._set_device)
        patch.setattr(torch.accelerator, "current_device_index", lambda: self.current)
        patch.setattr(torch.accelerator, "synchronize", self._use)
        properties = lambda device: SimpleNamespace(name="H200", uuid=f"uuid-{torch.device(device).index}")  # noqa: E731
        patch.setattr(torch.cuda, "get_device_properties", properties)
        patch.setattr(dist, "is_nccl_available", lambda: self.nccl)
        return self

    def _init(self) -> None:
        if not self.visible:
            raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one.\nMore.")

    def _set_device(self, index: int) -> None:
        assert index < self.visible
        self.current = index

    def _use(self, device: torch.device) -> None:
        if device.index in self.broken:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nMore.")
