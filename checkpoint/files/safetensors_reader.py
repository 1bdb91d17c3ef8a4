"""A tensor in a safetensors file, read by the safetensors library in pieces.

The library maps a file into memory, without reading it; the pages that are then read count as resident memory of the
process until the mapping goes. So there is one mapping at a time, and after 16 MiB of it the next. The library's
other backend, ``"pread"``, is none for this: it reads the whole tensor for every piece.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_MAPPED_BYTES = 2**24
_PIECE = 2**22


class Mapping:
    """The file that is mapped, one at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        # Any: the library's annotations lack those of its methods.
        self._file: Any = None
        self._bytes_read = 0

    def part(self, stored: "StoredTensor", start: int, stop: int) -> torch.Tensor:
        """Values ``start`` to ``stop`` of ``stored``, in one dimension, in the mapped file, which they keep mapped.

        Raises ``OSError`` where the file is not what its header was read of.
        """
        count = (stop - start) * stored.dtype.itemsize
        if stored.path != self._path or self._bytes_read + count > _MAPPED_BYTES:
            self._map(stored)
        self._bytes_read += count
        whole: torch.Tensor = self._file.get_tensor(stored.name)
        return whole.view(-1)[start:stop]

    def _map(self, stored: "StoredTensor") -> None:
        self._path = self._file = None
        if _stamp(stored.path) != stored.stamp:
            raise OSError(f"{stored.path} was changed before all its tensors were read: load again.")
        self._file = safe_open(stored.path, framework="pt")
        self._path = stored.path
        self._bytes_read = 0


@dataclass(frozen=True)
class StoredTensor:
    """The tensor ``name`` of ``shape`` and ``dtype`` in the file ``path``, the one at ``place`` of those there.

    ``stamp`` tells the file from what it may be replaced by; values are read by way of ``mapping``.
    """

    path: Path
    stamp: tuple[int, int, int]
    mapping: Mapping
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: int

    def on_meta(self) -> torch.Tensor:
        """A tensor like it without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read_into(self, destination: torch.Tensor) -> None:
        """Read all values into ``destination``, of the same shape, on any device and of any dtype.

        At most 32 MiB of the file are resident, unless ``destination`` is not contiguous, which takes the bytes of a
        whole tensor. Raises ``OSError`` for a file that was changed.
        """
        assert destination.shape == self.shape
        destination = destination.detach()
        if not destination.is_contiguous():
            destination.copy_(self.read(self.dtype))
            return
        flat = destination.view(-1)
        for start, stop in self._pieces():
            flat[start:stop].copy_(self.mapping.part(self, start, stop))

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The values in ``dtype``, on the CPU, at most 2**22 of them at once, in one dimension; not to be changed."""
        for start, stop in self._pieces():
            yield self.mapping.part(self, start, stop).to(dtype)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the CPU with the values in ``dtype``."""
        values = torch.empty(self.shape, dtype=dtype)
        self.read_into(values)
        return values

    def _pieces(self) -> Iterator[tuple[int, int]]:
        count = prod(self.shape)
        for start in range(0, count, _PIECE):
            yield start, min(start + _PIECE, count)


def read_header(path: Path, mapping: Mapping) -> dict[str, StoredTensor]:
    """The tensors in the safetensors file ``path``, by name; no values are read.

    Raises ``ValueError`` for a file that is truncated, corrupt, or has a tensor of a dtype that the library has not or
    torch does not convert, and ``OSError`` for one that cannot be read.
    """
    stamp = _stamp(path)
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or corrupt ({error}); it has {path.stat().st_size} bytes. Copy or download it again."
        ) from error
    tensors = {}
    for place, name in enumerate(file.offset_keys()):
        shape, dtype = _shape_and_dtype(path, file, name)
        tensors[name] = StoredTensor(path, stamp, mapping, name, shape, dtype, place)
    return tensors


def _shape_and_dtype(path: Path, file: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        tensor = file.get_tensor(name)
        _check_converts(tensor.dtype)
    except (SafetensorError, RuntimeError) as error:
        dtype = file.get_slice(name).get_dtype()
        raise ValueError(f"{name} in {path} has the dtype {dtype}, which cannot be loaded.") from error
    return tuple(tensor.shape), tensor.dtype


@cache
def _check_converts(dtype: torch.dtype) -> None:
    torch.empty(1, dtype=dtype).to(torch.complex64)


def _stamp(path: Path) -> tuple[int, int, int]:
    # The library says of a file that may not be read that it is not there.
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns
