"""Copy of a user's module that may be divided, cut and trained while the module itself stays as it is."""

import copy
import warnings

import torch
from torch import nn

from nxdpp.doors.local_modules import over_the_same_memory


def shared_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose parameters are new objects over the same memory.

    Ties stay. Buffers and other attributes are copied. A module on the meta device is returned as it is: a copy would
    lose what ``deferred_init`` has recorded. So is one that cannot be copied, with a warning.
    """
    parameters = list(module.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return module
    try:
        return copy.deepcopy(module, {id(parameter): over_the_same_memory(parameter) for parameter in parameters})
    except Exception as error:
        warnings.warn(
            f"the given {type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and is used up: "
            f"use the parallel module in its place",
            stacklevel=4,
        )
        return module


def take_own_memory(part: nn.Module, module: nn.Module) -> None:
    """Give each parameter of ``part`` memory of its own if it shares memory with ``module``."""
    if part is module:
        return
    shared = {_memory(parameter) for parameter in module.parameters()}
    for parameter in part.parameters():
        if not parameter.is_meta and _memory(parameter) in shared:
            parameter.data = parameter.data.clone()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
