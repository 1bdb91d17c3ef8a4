"""Shape and dtype of a tensor in a file, and names from files as messages show them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

_LONGEST = 150


class _Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class StoredLayout:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    def on_meta(self) -> torch.Tensor:
        """A meta tensor of the same shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def layout_of(tensor: _Shaped) -> StoredLayout:
    """StoredLayout of ``tensor``."""
    return StoredLayout(tuple(tensor.shape), tensor.dtype)


def layouts_of(tensors: Mapping[str, _Shaped]) -> dict[str, StoredLayout]:
    """Layouts of ``tensors`` by name."""
    return {name: layout_of(tensor) for name, tensor in tensors.items()}


def printable(text: object, longest: int = _LONGEST) -> str:
    """Return ``text`` with escapes for control characters and the like, and with at most ``longest`` characters."""
    whole = str(text)
    start = whole[:longest]
    shown = start if start.isprintable() else start.encode("unicode_escape").decode()
    return shown if len(whole) <= longest else f"{shown}... ({len(whole):,} characters)"


def listed(names: Sequence[str], shown: int = 10) -> str:
    """The first of ``names`` for a message, and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(printable(name, 300) for name in names[:shown]) + more
