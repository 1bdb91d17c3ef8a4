"""Sizes that divide, and parts of a tensor."""

import os
from collections.abc import Sequence

import torch

from nxdpp.tensor.tensor_attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
)

__all__ = [
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "get_local_world_size",
    "param_is_not_tensor_parallel_duplicate",
    "requires_init_pg_override",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ``ValueError`` unless ``denominator`` divides ``numerator``."""
    if denominator < 1 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``; ``ValueError`` if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_local_world_size() -> int:
    """Return the number of ranks on this host, of ``torchrun``; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def requires_init_pg_override() -> bool:
    """Return ``False``: only torch_xla 2.0 starts its groups in a different way."""
    return False


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split ``tensor`` into equal parts along its last dimension: views, or contiguous copies if asked for.

    Raises ``ValueError`` for a size that does not divide.
    """
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), -1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)
