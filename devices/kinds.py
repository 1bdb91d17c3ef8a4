"""The kinds of devices, by their type in torch."""

import torch

from nxdpp.devices.cuda import CudaDevice
from nxdpp.devices.device import Device

KINDS: dict[str, type[Device]] = {"cuda": CudaDevice}
"""The class of each device type whose work the host must follow. Others are ``Device``."""


def device_of(device: torch.device) -> Device:
    """Return the interface of ``device``."""
    return KINDS.get(device.type, Device)(device)
