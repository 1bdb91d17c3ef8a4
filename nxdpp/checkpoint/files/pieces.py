"""Tensors in files: shape, dtype and pieces of their bytes, the rectangles that are read, and names for messages.

A rectangle of whole rows is read right into its destination. Any other passes through a piece of memory::

    rows 1 and 2 of 4 x 5      one read
    columns 3 and 4            a read of each row's run, or of whole rows where runs are short
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from nxdpp.counted import counted

PIECE_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
"""A checksum of fewer bytes takes less time than another thread needs to begin."""
SHORTEST_RUN = 1 << 12
"""Bytes; shorter runs share pages."""
_LONGEST = 150


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


def layout_of(tensor: torch.Tensor | StoredLayout) -> StoredLayout:
    """StoredLayout of ``tensor``."""
    return StoredLayout(tuple(tensor.shape), tensor.dtype)


def layouts_of(tensors: Mapping[str, torch.Tensor] | Mapping[str, StoredLayout]) -> dict[str, StoredLayout]:
    """Layouts of ``tensors`` by name."""
    return {name: layout_of(tensor) for name, tensor in tensors.items()}


def printable(text: object, longest: int = _LONGEST) -> str:
    """Return ``text`` with escapes for control characters and the like, and with at most ``longest`` characters."""
    whole = str(text)
    start = whole[:longest]
    shown = start if start.isprintable() else start.encode("unicode_escape").decode()
    return shown if len(whole) <= longest else f"{shown}... ({counted(len(whole), 'character')})"


def listed(names: Sequence[str], shown: int = 10) -> str:
    """The first of ``names`` for a message, and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(printable(name, 300) for name in names[:shown]) + more


class FileSpan(NamedTuple):
    """Bytes of a tensor in a file, and the CRC-32 of each piece of ``PIECE_BYTES`` of them, or none."""

    file: str
    start: int
    length: int
    checksums: tuple[int, ...]


Read = Callable[[int, memoryview], None]
"""Fills memory with the bytes of a stored tensor from a byte of it on."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension of stride 1, which ``view(-1)`` does not give for one element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous ``tensor`` on the CPU."""
    return flat(tensor).view(torch.uint8).numpy().data


def read_bytes(descriptor: int, place: int, into: memoryview) -> int:
    """Fill ``into`` from ``place`` on, and return the number of bytes: fewer where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], place + done)
        if count == 0:
            break
        done += count
    return done


def read_region(
    read: Read,
    shape: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    destination: torch.Tensor,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Read a rectangle of a stored tensor of ``shape`` into ``destination``, which has the rectangle's shape.

    ``offsets`` are of the rectangle in the tensor. ``destination`` is on any device, of any dtype and strides. It has
    its values after ``wait``, which waits for the reads.
    """
    destination = destination.detach()
    if not shape:
        shape, offsets, destination = (1,), (0,), destination.view(1)
    is_plain = destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()
    if is_plain and destination.numel() and tuple(destination.shape[1:]) == tuple(shape[1:]):
        read(offsets[0] * dtype.itemsize * prod(shape[1:]), bytes_of(destination))
        return

    def read_now(start: int, into: memoryview) -> None:
        read(start, into)
        wait()

    for place, values in region_values(read_now, shape, dtype, offsets, destination.shape):
        destination[place].copy_(values)


def verify_region(
    read: Read, shape: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int]
) -> None:
    """Read a rectangle of ``sizes`` of a stored tensor of ``shape``, and drop its values."""
    if not shape:
        shape, offsets, sizes = (1,), (0,), (1,)
    for _ in region_values(read, shape, dtype, offsets, sizes):
        pass


def region_values(
    read: Read, shape: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int], base: int = 0
) -> Iterator[tuple[tuple[int | slice, ...], torch.Tensor]]:
    """Give the values of a rectangle in pieces of at most ``PIECE_BYTES``, each with its index in the rectangle.

    The next piece has the memory of the one before. The stored tensor begins at byte ``base``, and has dimensions.
    """
    row = dtype.itemsize * prod(shape[1:])
    first = base + offsets[0] * row
    if prod(sizes) == 0:
        return
    if row > PIECE_BYTES and len(shape) > 1:
        for number in range(sizes[0]):
            for place, values in region_values(read, shape[1:], dtype, offsets[1:], sizes[1:], first + number * row):
                yield (number, *place), values
        return
    together = min(sizes[0], max(1, PIECE_BYTES // row))
    memory = torch.empty((together, *sizes[1:]), dtype=dtype, device="cpu")
    for start in range(0, sizes[0], together):
        values = memory[: sizes[0] - start]
        _fill(read, first + start * row, shape[1:], offsets[1:], values)
        yield (slice(start, start + len(values)),), values


def _fill(read: Read, at: int, inner: Sequence[int], offsets: Sequence[int], rows: torch.Tensor) -> None:
    """Read ``rows``, contiguous parts of rows of shape ``inner`` of which the first begins at byte ``at``."""
    sizes = rows.shape[1:]
    if tuple(sizes) == tuple(inner):
        read(at, bytes_of(rows))
    elif _run(inner, sizes) * rows.dtype.itemsize < SHORTEST_RUN:
        whole = torch.empty((len(rows), *inner), dtype=rows.dtype, device="cpu")
        read(at, bytes_of(whole))
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True), 1):
            whole = whole.narrow(dim, offset, size)
        rows.copy_(whole)
    else:
        part = rows.dtype.itemsize * prod(inner[1:])
        for number, row in enumerate(rows):
            _fill(read, at + (number * inner[0] + offsets[0]) * part, inner[1:], offsets[1:], row)


def _run(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of elements that follow each other in a rectangle of ``sizes``."""
    run = 1
    for whole, size in zip(reversed(shape), reversed(sizes), strict=True):
        run *= size
        if size < whole:
            break
    return run
