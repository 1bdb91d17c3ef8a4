"""Copies that keep the strides of a tensor: the order in which kernels sum depends on the strides of their inputs."""

from collections.abc import Sequence

import torch


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` with the same strides, also where dense memory would have others."""
    return tensor.clone() if tensor.is_contiguous() else with_strides(tensor, tensor.stride())


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of ``tensor`` with ``strides``. Dimensions of stride 0 are expanded.

    Where elements would overlap in another way, as in windows, it is a plain copy.
    """
    part = _first_of_repeated(tensor, strides)
    if _overlap(part.size(), strides):
        return tensor.clone()
    memory = torch.empty_strided(part.size(), strides, dtype=tensor.dtype, device=tensor.device).copy_(part)
    return memory.as_strided(tensor.size(), strides)


def without_repetitions(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with a size of 1 in its expanded dimensions; a copy of it where elements overlap in another way."""
    part = _first_of_repeated(tensor, tensor.stride())
    return tensor.clone(memory_format=torch.contiguous_format) if _overlap(part.size(), part.stride()) else part


def _first_of_repeated(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _overlap(size: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 0
    for stride, length in sorted((stride, length) for stride, length in zip(strides, size, strict=True) if length > 1):
        if stride <= reach:
            return True
        reach += (length - 1) * stride
    return False
