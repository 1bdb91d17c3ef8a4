"""Tensors of a safetensors file, read by position, so that only a piece of a tensor is in memory.

The safetensors library parses and verifies the header. Its tensors follow each other without gaps up to the end of the
file, so the place of each follows from the shapes. The library itself would map the file, or read whole tensors.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nxdpp.checkpoint.files.pieces import StoredLayout, layout_of, printable, read_bytes, read_region, region_values

Rectangle = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes."""


class OpenFile:
    """The one file that is open at present."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def read(self, stored: "StoredTensor", start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of ``stored`` from ``start`` on.

        Raises ``OSError`` if the file was changed after its header was read.
        """
        if stored.path != self._path:
            self._close()
            self._descriptor = os.open(stored.path, os.O_RDONLY)
            self._path = stored.path
        is_same = _stamp_of(self._descriptor) == stored.stamp
        if not is_same or read_bytes(self._descriptor, stored.place + start, into) < len(into):
            raise OSError(f"{stored.path} was changed before all its tensors were read: load again.")

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)
            self._path = None


@dataclass(frozen=True)
class StoredTensor(StoredLayout):
    """A tensor in ``file``, values from byte ``place`` on; by its ``stamp`` a changed file is found."""

    path: Path
    stamp: tuple[int, int, int]
    file: OpenFile
    name: str
    place: int

    def read_into(self, destination: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Read the values into ``destination``, of any device and any dtype.

        It has the shape of the tensor, or of a rectangle of it from ``offsets`` on. Raises ``OSError`` if the file was
        changed.
        """
        assert offsets is not None or destination.shape == self.shape
        offsets = (0,) * destination.ndim if offsets is None else offsets
        read_region(partial(self.file.read, self), self.shape, self.dtype, offsets, destination)

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The values in ``dtype`` on the CPU in order, in pieces of at most 8 MiB; the next replaces one."""
        for values in self._values():
            yield values.to(dtype)

    def has_nan(self, rectangles: Iterable[Rectangle | None] = (None,)) -> bool:
        """Return whether a value in ``rectangles``, by default any, is not a number; reads these, if any can be."""
        return self.dtype.is_floating_point and any(has_nan(each) for one in rectangles for each in self._values(one))

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a new CPU tensor with the values in ``dtype``, by default their own."""
        values = torch.empty(self.shape, dtype=dtype or self.dtype, device="cpu")
        self.read_into(values)
        return values

    def _values(self, rectangle: Rectangle | None = None) -> Iterator[torch.Tensor]:
        """The values of a rectangle, or of the whole, in pieces."""
        shape = self.shape or (1,)
        offsets, sizes = ((0,) * len(shape), shape) if rectangle is None or not self.shape else rectangle
        return (each for _, each in region_values(partial(self.file.read, self), shape, self.dtype, offsets, sizes))


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
