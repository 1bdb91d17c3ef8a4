"""A process with an XLA device and without nxdpp: models on it, and their recorded operations."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.support.xla_ranks import ENVIRONMENT


def start_xla() -> torch.device:
    """Start PJRT's CPU device in this process, and return it.

    Call this before the first backward on the CPU: autograd's engine counts the devices at the first one.
    """
    os.environ |= ENVIRONMENT
    import torch_xla

    device: torch.device = torch_xla.device()
    return device


def placed(model: nn.Module, device: torch.device) -> Any:
    """Move ``model`` to ``device``, and return it. Parameters that several names share stay shared.

    ``Module.to`` makes a parameter of its own for each name on an XLA device.
    """
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    model.to(device)
    for first, *others in shared.values():
        parameter = model.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, parameter)
    return model


def on_device(microbatch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy a microbatch to ``device``."""
    return {name: value.to(device) for name, value in microbatch.items()}


def run_recorded(device: torch.device) -> None:
    """Run the recorded operations of an XLA device."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
