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


@dataclass(frozen=True)
class Part:
    """Part ``index`` of ``count`` equal ones along ``dim``, of each of ``stride`` blocks.

    Attributes:
        padded: number of elements along ``dim`` with those that files do not have, behind the others; 0 for none, and
            with blocks.
    """

    dim: int
    index: int
    count: int
    stride: int
    padded: int = 0

    def own(self, size: int) -> tuple[int, int]:
        """First element, and number of elements, that a padded part has of ``size`` along ``dim``."""
        chunk = self.padded // self.count
        start = min(self.index * chunk, size)
        return start, min(chunk, size - start)


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

    def read_into(self, destination: torch.Tensor, part: Part | None = None) -> None:
        """Read the values into ``destination``, which has the same shape, any device and any dtype.

        With ``part`` it has the shape of a part, without padding. The pages of the other parts are not touched. At most
        32 MiB of the file are in memory, or one row of the dimensions before the divided one. A ``destination`` that is
        not contiguous needs a copy of the tensor. Raises ``OSError`` if the file was changed.
        """
        destination = destination.detach()
        if not destination.is_contiguous():
            values = torch.empty(destination.shape, dtype=self.dtype)
            self.read_into(values, part)
            destination.copy_(values)
            return
        assert part is not None or destination.shape == self.shape
        flat, done = destination.view(-1), 0
        for piece in self._parts(part):
            flat[done : done + piece.numel()].view(piece.shape).copy_(piece)
            done += piece.numel()
        assert done == flat.numel()

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The flattened values in ``dtype`` on the CPU, in read-only pieces of at most 2**22 elements."""
        for start, stop in self._pieces():
            yield self.mapping.part(self, start, stop).to(dtype)

    def has_nan(self, part: Part | None = None) -> bool:
        """Return whether a value, or one of ``part``, is not a number; reads these values."""
        return any(map(has_nan, self._parts(part)))

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a new CPU tensor with the values in ``dtype``."""
        values = torch.empty(self.shape, dtype=dtype)
        self.read_into(values)
        return values

    def _parts(self, part: Part | None) -> Iterator[torch.Tensor]:
        """The values of ``part`` or all values, in order, in pieces that are in the mapped file."""
        if part is None:
            yield from (self.mapping.part(self, start, stop) for start, stop in self._pieces())
            return
        width = prod(self.shape[part.dim :])
        chunk = width // (part.count * part.stride)
        rows = prod(self.shape[: part.dim])
        offset = 0
        if part.padded:
            inner = width // self.shape[part.dim]
            offset, chunk = (inner * number for number in part.own(self.shape[part.dim]))
        if rows == 1:
            for block in range(part.stride):
                first = offset if part.padded else (block * part.count + part.index) * chunk
                for start in range(first, first + chunk, _PIECE):
                    yield self.mapping.part(self, start, min(start + _PIECE, first + chunk))
            return
        together = max(1, _PIECE // max(1, width))
        for row in range(0, rows, together):
            count = min(together, rows - row)
            values = self.mapping.part(self, row * width, (row + count) * width)
            if part.padded:
                yield values.view(count, width)[:, offset : offset + chunk]
            else:
                yield values.view(count, part.stride, part.count, chunk)[:, :, part.index]

    def _pieces(self) -> Iterator[tuple[int, int]]:
        count = prod(self.shape)
        for start in range(0, count, _PIECE):
            yield start, min(start + _PIECE, count)


def has_nan(values: torch.Tensor) -> bool:
    """Return whether a value of a floating dtype is not a number."""
    if not values.dtype.is_floating_point:
        return False
    if values.dtype.itemsize < 2:
        # Sums of 8 bits are not implemented.
        values = values.to(torch.float32)
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
