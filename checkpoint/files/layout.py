"""Shape and dtype of a tensor in a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize


def layout_of(tensor: torch.Tensor) -> Layout:
    """Layout of ``tensor``."""
    return Layout(tuple(tensor.shape), tensor.dtype)


def layouts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
    """Layouts of ``tensors`` by name."""
    return {name: layout_of(tensor) for name, tensor in tensors.items()}
