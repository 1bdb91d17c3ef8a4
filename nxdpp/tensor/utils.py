"""Sizes that divide, and the slice of a tensor that a tensor-parallel rank holds."""

import os
from collections.abc import Sequence

import torch

from nxdpp.tensor.tensor_attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)

__all__ = [
    "EmbeddingUtility",
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "get_local_world_size",
    "local_slice",
    "param_is_not_tensor_parallel_duplicate",
    "requires_init_pg_override",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_dim",
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


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split ``tensor`` into ``num_partitions`` equal parts along ``dim``: views, or contiguous copies if asked for.

    Raises ``ValueError`` for a size that does not divide.
    """
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split ``tensor`` into equal parts along its last dimension, as ``split_tensor_along_dim`` does."""
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def local_slice(full: torch.Tensor, dim: int, rank: int, size: int, stride: int = 1) -> torch.Tensor:
    """Part of ``full`` that ``rank`` of ``size`` holds: a view for ``stride`` 1, else a copy.

    With ``stride`` blocks along ``dim``, such as the three of a fused query, key and value, the rank holds its part of
    each block::

        stride 3, size 2:   q0 q1 | k0 k1 | v0 v1     rank 0: q0 k0 v0     rank 1: q1 k1 v1
    """
    chunks = torch.split(full, divide(full.shape[dim], size * stride), dim)[rank::size]
    return chunks[0] if stride == 1 else torch.cat(chunks, dim)


class EmbeddingUtility:
    """Ranges of token ids over the tensor-parallel ranks."""

    @staticmethod
    def range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int) -> tuple[int, int]:
        """First id of ``rank``, and the id after its last one."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """First id of ``rank``, and the id after its last one; ``ValueError`` for a size that does not divide."""
        return EmbeddingUtility.range_from_per_partition_vocab_size(divide(global_vocab_size, world_size), rank)
