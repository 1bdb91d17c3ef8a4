"""Tensors of a safetensors file, read by position, so that only a piece of a tensor is in memory.

The safetensors library parses and verifies the header. Its tensors follow each other without gaps up to the end of the
file, so the place of each follows from the shapes. The library itself would map the file, or read whole tensors.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nxdpp.checkpoint.files.layout import StoredLayout, layout_of, printable
from nxdpp.checkpoint.files.pieces import bytes_of, flat, read_bytes

_PIECE = 2**22
# Shorter runs share pages: the rows that they are in are read whole.
_SHORTEST_RUN = 2**12


class Elements(NamedTuple):
    """Elements along ``dim`` of a tensor: ``length`` from each of ``starts`` on."""

    dim: int
    starts: tuple[int, ...]
    length: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of ``whole``."""
        return torch.cat([whole.narrow(self.dim, start, self.length) for start in self.starts], self.dim)


class Piece(NamedTuple):
    """Elements of a flattened tensor: the same runs in each of ``rows`` rows of ``width`` elements.

    Attributes:
        first: element at which the first row begins.
        starts: of the runs in a row.
        run: number of elements in a run.
    """

    first: int
    rows: int
    width: int
    starts: tuple[int, ...]
    run: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * len(self.starts) * self.run


class OpenFile:
    """The one file that is open at present."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def read(self, stored: "StoredTensor", piece: Piece, values: torch.Tensor) -> None:
        """Fill ``values`` of one dimension, on the CPU and in the dtype of ``stored``, with the elements of ``piece``.

        Raises ``OSError`` if the file was changed after its header was read.
        """
        if stored.path != self._path:
            self._open(stored.path)
        if _stamp_of(self._descriptor) != stored.stamp:
            raise _changed(stored.path)
        size = stored.dtype.itemsize
        first = stored.place + piece.first * size
        if piece.rows > 1 and piece.run * size < _SHORTEST_RUN:
            rows = torch.empty((piece.rows, piece.width), dtype=stored.dtype, device="cpu")
            self._fill(first, bytes_of(rows))
            runs = values.view(piece.rows, len(piece.starts), piece.run)
            for number, start in enumerate(piece.starts):
                runs[:, number] = rows[:, start : start + piece.run]
            return
        into, done, length = bytes_of(values), 0, piece.run * size
        for row in range(piece.rows):
            for start in piece.starts:
                self._fill(first + (row * piece.width + start) * size, into[done : done + length])
                done += length

    def __del__(self) -> None:
        self._close()

    def _fill(self, place: int, into: memoryview) -> None:
        assert self._path is not None
        if read_bytes(self._descriptor, place, into) < len(into):
            raise _changed(self._path)

    def _open(self, path: Path) -> None:
        self._close()
        self._descriptor = os.open(path, os.O_RDONLY)
        self._path = path

    def _close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)
            self._path = None


@dataclass(frozen=True)
class StoredTensor(StoredLayout):
    """A tensor of a safetensors file, whose values are read through ``file``.

    Attributes:
        stamp: identity of the file, by which a changed file is found.
        place: byte of the file at which the values begin.
    """

    path: Path
    stamp: tuple[int, int, int]
    file: OpenFile
    name: str
    place: int

    def read_into(self, destination: torch.Tensor, part: Elements | None = None) -> None:
        """Read the values into ``destination``, which has the same shape, any device and any dtype.

        With ``part`` it has the shape of a part, without padding. Values of another device or dtype pass through a
        piece of 2**22 elements, or one row of the dimensions before the divided one. A ``destination`` that is not
        contiguous needs a copy of the tensor. Raises ``OSError`` if the file was changed.
        """
        destination = destination.detach()
        if not destination.is_contiguous():
            values = torch.empty(destination.shape, dtype=self.dtype, device="cpu")
            self.read_into(values, part)
            destination.copy_(values)
            return
        assert part is not None or destination.shape == self.shape
        memory, done = flat(destination), 0
        if destination.device.type == "cpu" and destination.dtype == self.dtype:
            for piece in self._pieces(part):
                self.file.read(self, piece, memory[done : done + piece.numel])
                done += piece.numel
        else:
            for values in self._values(part):
                memory[done : done + values.numel()].copy_(values)
                done += values.numel()
        assert done == memory.numel()

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The flattened values in ``dtype`` on the CPU, in pieces of at most 2**22 elements; the next replaces one."""
        for values in self._values(None):
            yield values.to(dtype)

    def has_nan(self, part: Elements | None = None) -> bool:
        """Return whether a value, or one of ``part``, is not a number; reads these values, if any can be."""
        return self.dtype.is_floating_point and any(map(has_nan, self._values(part)))

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a new CPU tensor with the values in ``dtype``, by default their own."""
        values = torch.empty(self.shape, dtype=dtype or self.dtype, device="cpu")
        self.read_into(values)
        return values

    def _values(self, part: Elements | None) -> Iterator[torch.Tensor]:
        """The values of ``part`` or all values, in order, flattened, in pieces in one memory."""
        memory: torch.Tensor | None = None
        for piece in self._pieces(part):
            if memory is None or memory.numel() < piece.numel:
                memory = torch.empty(piece.numel, dtype=self.dtype, device="cpu")
            values = memory[: piece.numel]
            self.file.read(self, piece, values)
            yield values

    def _pieces(self, part: Elements | None) -> Iterator[Piece]:
        """The pieces of ``part`` or of the whole, in order."""
        if part is None:
            yield from _in_a_row(0, prod(self.shape))
            return
        inner, rows = prod(self.shape[part.dim + 1 :]), prod(self.shape[: part.dim])
        width, run = self.shape[part.dim] * inner, part.length * inner
        starts = tuple(start * inner for start in part.starts)
        if run == 0:
            return
        if rows == 1:
            for start in starts:
                yield from _in_a_row(start, run)
            return
        together = max(1, _PIECE // width)
        for row in range(0, rows, together):
            yield Piece(row * width, min(together, rows - row), width, starts, run)


def _in_a_row(first: int, count: int) -> Iterator[Piece]:
    for start in range(first, first + count, _PIECE):
        run = min(_PIECE, first + count - start)
        yield Piece(start, 1, run, (0,), run)


def has_nan(values: torch.Tensor) -> bool:
    """Return whether a value of a floating dtype is not a number."""
    if not values.dtype.is_floating_point:
        return False
    if values.dtype.itemsize < 2:
        # Sums of 8 bits are not implemented.
        values = values.to(torch.float32)
    # The sum is fast. It is not a number for infinities of both signs too.
    return bool(values.sum().isnan()) and bool(values.isnan().any())


def read_header(path: Path, opened: OpenFile) -> dict[str, StoredTensor]:
    """Return the tensors of the safetensors file ``path`` by name, in its order, without their values.

    Their values are read through ``opened``.

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
    found = {name: _layout(path, file, name) for name in file.offset_keys()}
    place = stamp[1] - sum(each.bytes for each in found.values())
    tensors = {}
    for name, each in found.items():
        tensors[name] = StoredTensor(each.shape, each.dtype, path, stamp, opened, name, place)
        place += each.bytes
    return tensors


def _layout(path: Path, file: Any, name: str) -> StoredLayout:
    try:
        tensor = file.get_tensor(name)
        _check_converts(tensor.dtype)
    except (SafetensorError, RuntimeError) as error:
        dtype = file.get_slice(name).get_dtype()
        raise ValueError(f"{printable(name)} in {path} has the dtype {dtype}, which cannot be loaded.") from error
    return layout_of(tensor)


@cache
def _check_converts(dtype: torch.dtype) -> None:
    torch.empty(1, dtype=dtype).to(torch.complex64)


def _stamp(path: Path) -> tuple[int, int, int]:
    # Opened, because the library reports an unreadable file as a missing one.
    with path.open("rb") as file:
        return _stamp_of(file.fileno())


def _stamp_of(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: Path) -> OSError:
    return OSError(f"{path} was changed before all its tensors were read: load again.")
