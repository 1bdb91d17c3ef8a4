"""Tensors of a safetensors file, read in pieces so that only a small part of the file is in memory.

The safetensors library maps a file into memory. Pages that are read count as resident memory of the process until the
file is unmapped. So a ``Mapping`` maps one file at a time, and maps it again after 16 MiB. The library's other backend
(``"pread"``) would read the whole tensor for each piece.
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

from nxdpp.checkpoint.files.printable import printable

_MAPPED_BYTES = 2**24
_PIECE = 2**22


class Mapping:
    """The one file that is mapped at present."""

    def __init__(self) -> None:
        self._path: Path | None = None
        # Any: the library's annotations lack those of its methods.
        self._file: Any = None
        self._bytes_read = 0

    def part(self, stored: "StoredTensor", start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the flattened ``stored``; the result is in the mapped file.

        Raises ``OSError`` if the file was changed after its header was read.
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
    """A tensor of a safetensors file, whose values are read through ``mapping``.

    Attributes:
        stamp: identity of the file, by which a changed file is found.
        place: index of the tensor in the order of the file.
    """

    path: Path
    stamp: tuple[int, int, int]
    mapping: Mapping
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: int

    def on_meta(self) -> torch.Tensor:
        """A meta tensor of the same shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read_into(self, destination: torch.Tensor) -> None:
        """Read all values into ``destination``, which has the same shape, any device and any dtype.

        At most 32 MiB of the file are in memory. A ``destination`` that is not contiguous needs a copy of the tensor.
        Raises ``OSError`` if the file was changed.
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
        """The flattened values in ``dtype`` on the CPU, in read-only pieces of at most 2**22 elements."""
        for start, stop in self._pieces():
            yield self.mapping.part(self, start, stop).to(dtype)

    def has_nan(self) -> bool:
        """Return whether a value is not a number; reads all values."""
        return any(map(has_nan, self.pieces(self.dtype)))

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a new CPU tensor with the values in ``dtype``."""
        values = torch.empty(self.shape, dtype=dtype)
        self.read_into(values)
        return values

    def _pieces(self) -> Iterator[tuple[int, int]]:
        count = prod(self.shape)
        for start in range(0, count, _PIECE):
            yield start, min(start + _PIECE, count)


def has_nan(values: torch.Tensor) -> bool:
    """Return whether a value of a floating dtype of at least 16 bits is not a number."""
    if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
        return False
    # The sum is fast. It is not a number for infinities of both signs too.
    return bool(values.sum().isnan()) and bool(values.isnan().any())


def read_header(path: Path, mapping: Mapping) -> dict[str, StoredTensor]:
    """Return the tensors of the safetensors file ``path`` by name, without their values.

    Raises ``ValueError`` for a damaged file and for a dtype that cannot be converted. Raises ``OSError`` for an
    unreadable file.
    """
    stamp = _stamp(path)
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or corrupt ({printable(error, 300)}); it has {path.stat().st_size} bytes. Copy or "
            f"download it again."
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
        raise ValueError(f"{printable(name)} in {path} has the dtype {dtype}, which cannot be loaded.") from error
    return tuple(tensor.shape), tensor.dtype


@cache
def _check_converts(dtype: torch.dtype) -> None:
    torch.empty(1, dtype=dtype).to(torch.complex64)


def _stamp(path: Path) -> tuple[int, int, int]:
    # Opened, because the library reports an unreadable file as a missing one.
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns
