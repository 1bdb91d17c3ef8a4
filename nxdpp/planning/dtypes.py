"""Dtypes of models, and their names."""

import torch
from torch import nn

from nxdpp.tracing.modules import listings


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating parameter; float32 without one."""
    return next((p.dtype for p in listings.parameters(model) if p.is_floating_point()), torch.float32)


def dtype_named(name: torch.dtype | str) -> torch.dtype:
    """Return the dtype of ``name``, such as ``"bfloat16"``; ``ValueError`` for any other name."""
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={name!r} is no floating dtype of torch, such as 'bfloat16'.")
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of ``dtype``, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
