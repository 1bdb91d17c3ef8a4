"""Safetensors files that are written in pieces, with a checksum of each piece, and read back by ranges.

A file is written tensor by tensor, so that a piece of one alone is copied to the memory of the host. The checksums are
returned: a checkpoint keeps them in its document, outside of the files they are of.
"""

import errno
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from nxdpp.checkpoint.files.layout import Layout, layout_of, layouts_of

PIECE_BYTES = 8 << 20
_BEHIND_BYTES = 32 << 20
"""Bytes of the page cache whose transfer to the disk begins together."""
_SMALL_BYTES = 1 << 20
"""A checksum of fewer bytes takes less time than another thread needs to begin."""
_THREADS = 2
"""Pieces that are read, and whose checksums are taken, at the same time."""

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def holds_dtype(dtype: torch.dtype) -> bool:
    """Return whether a file can have a tensor of ``dtype``."""
    return dtype in _NAMES


class Span(NamedTuple):
    """Bytes of a tensor in a file, and the CRC-32 of each piece of ``PIECE_BYTES`` of them."""

    file: str
    start: int
    length: int
    checksums: tuple[int, ...]


def write_checksummed(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Span]:
    """Write ``tensors`` to the safetensors file ``path``, and return the place of each; see ``write_streamed``."""
    return write_streamed(path, layouts_of(tensors), tensors.items())


def write_streamed(
    path: Path, layouts: Mapping[str, Layout], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, Span]:
    """Write ``tensors``, which have the names and order of ``layouts``, and return the place of each.

    One tensor is taken at a time. The file is on the disk when this returns. Values of another device, or not
    contiguous, are copied piece by piece.

    Raises ``ValueError`` for a dtype that the format does not have, and ``OSError`` if the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, layout in layouts.items():
        if layout.dtype not in _NAMES:
            raise ValueError(f"{name} is of {layout.dtype}, which a safetensors file cannot hold: convert it first.")
        offsets = [end, end + layout.bytes]
        header[name] = {"dtype": _NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": offsets}
        end += layout.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format asks for data that is aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    spans = {}
    expected = iter(layouts.items())
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        at = 8 + len(text)
        begun = 0
        for name, tensor in tensors:
            assert next(expected) == (name, layout_of(tensor)), f"{name} is not as planned"
            checksums = []
            for piece in _pieces(tensor.detach()):
                checksums.append(_write_piece(file, piece, pool))
                at += len(piece)
                if at - begun >= _BEHIND_BYTES:
                    file.flush()
                    _begin_flush(file.fileno(), begun, at - begun)
                    begun = at
            spans[name] = Span(path.name, at - tensor.nbytes, tensor.nbytes, tuple(checksums))
        assert next(expected, None) is None, "a planned tensor is missing"
        file.flush()
        os.fsync(file.fileno())
    return spans


def _write_piece(file: BinaryIO, piece: memoryview, pool: Executor) -> int:
    """Write ``piece`` while another thread takes its checksum, which is returned."""
    if len(piece) < _SMALL_BYTES:
        file.write(piece)
        return zlib.crc32(piece)
    checksum = pool.submit(zlib.crc32, piece)
    try:
        file.write(piece)
    finally:
        # The caller may change the memory after an error.
        found = checksum.result()
    return found


def _begin_flush(descriptor: int, start: int, length: int) -> None:
    """Begin to write bytes of the page cache to the disk, and do not wait for them.

    A disk would have nothing to do until ``fsync`` otherwise. Linux starts the transfer at this advice.
    """
    if hasattr(os, "posix_fadvise"):
        # Advice alone: a file system that does not take it still has fsync.
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _pieces(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The bytes of ``tensor`` in pieces of ``PIECE_BYTES``, the last one shorter."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    flat = _flat(tensor)
    count = PIECE_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), count):
        piece = flat[start : start + count].cpu()
        yield piece.view(torch.uint8).numpy().data


class DamagedFile(ValueError):
    """A file of a checkpoint is missing, is shorter than it was, has other bytes, or its disk does not give them."""


@dataclass
class ChecksummedReader:
    """Reads bytes of spans in the files of ``directory``, and compares the checksum of each piece that it reads.

    One file is open at a time, and one piece is kept. Threads read whole pieces right into the destination: it has
    its values after ``wait``, or at the end of the block. Raises ``DamagedFile`` and ``OSError``.
    """

    directory: Path

    def __post_init__(self) -> None:
        self._name: str | None = None
        self._descriptor = -1
        self._kept: tuple[Span, int] | None = None
        self._piece = bytearray()
        self._pool = ThreadPoolExecutor(_THREADS)
        self._reads: deque[Future[None]] = deque()

    def __enter__(self) -> "ChecksummedReader":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            # Waits for the reads that have begun: the memory may be used again after an error.
            self._pool.shutdown(cancel_futures=True)
            self._close()

    def wait(self) -> None:
        """Wait until all destinations have their values, and raise the first error."""
        while self._reads:
            self._reads.popleft().result()

    def read(self, span: Span, start: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``span`` from ``start`` on."""
        stop, done = start + len(destination), 0
        while start + done < stop:
            number, skipped = divmod(start + done, PIECE_BYTES)
            first, last = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, span.length)
            count = min(last, stop) - start - done
            into = destination[done : done + count]
            if count == last - first:
                self._read_whole(span, number, into)
            else:
                self._keep(span, number, last - first)
                into[:] = memoryview(self._piece)[skipped : skipped + count]
            done += count

    def verify(self, span: Span) -> None:
        """Read all bytes of ``span``."""
        for number in range(len(span.checksums)):
            self._keep(span, number, min((number + 1) * PIECE_BYTES, span.length) - number * PIECE_BYTES)

    def _read_whole(self, span: Span, number: int, into: memoryview) -> None:
        """Read a whole piece; a large one in a thread."""
        self._open(span.file)
        if len(into) < _SMALL_BYTES:
            self._fill(span, number, into)
            return
        self._reads.append(self._pool.submit(self._fill, span, number, into))
        # An error ends the reads soon.
        while len(self._reads) > 2 * _THREADS:
            self._reads.popleft().result()

    def _keep(self, span: Span, number: int, length: int) -> None:
        if self._kept == (span, number):
            return
        self._kept = None
        if len(self._piece) != length:
            self._piece = bytearray(length)
        self._open(span.file)
        self._fill(span, number, memoryview(self._piece))
        self._kept = span, number

    def _fill(self, span: Span, number: int, into: memoryview) -> None:
        """Read a whole piece of the open file."""
        place, done = span.start + number * PIECE_BYTES, 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], place + done)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise DamagedFile(f"{self.directory / span.file} cannot be read ({error}): its disk fails.") from error
            if count == 0:
                size = os.fstat(self._descriptor).st_size
                raise DamagedFile(
                    f"{self.directory / span.file} is truncated: it has {size} bytes, and {place + len(into)} are "
                    f"needed."
                )
            done += count
        if zlib.crc32(into) != span.checksums[number]:
            raise DamagedFile(
                f"{self.directory / span.file} is damaged: bytes {place} to {place + len(into)} have another checksum "
                f"than when they were written."
            )

    def _close(self) -> None:
        if self._name is not None:
            os.close(self._descriptor)
            self._name = None

    def _open(self, name: str) -> None:
        if name == self._name:
            return
        self.wait()
        self._close()
        try:
            # A pipe would wait for a writer.
            self._descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise DamagedFile(
                f"{self.directory / name} is missing, or this host does not share the directory with the ranks that "
                f"saved."
            ) from error
        self._name = name


def read_region(
    reader: ChecksummedReader,
    span: Span,
    shape: Sequence[int],
    offsets: Sequence[int],
    destination: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Read a rectangle of a saved tensor of ``shape`` into ``destination``, which has the rectangle's shape.

    Args:
        reader, span: the place of the tensor.
        shape, dtype: of the saved tensor.
        offsets: of the rectangle in it.
        destination: on any device, of any dtype and strides. It has its values after ``reader.wait()``.
    """
    _read(reader, span, 0, tuple(shape), tuple(offsets), destination.detach(), dtype)


def _read(
    reader: ChecksummedReader,
    span: Span,
    base: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    destination: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """``read_region`` of a part of the tensor that begins at byte ``base``."""
    if destination.numel() == 0:
        return
    if not shape:
        shape, offsets, destination = (1,), (0,), destination.view(1)
    row = dtype.itemsize * torch.Size(shape[1:]).numel()
    first, count = offsets[0], destination.shape[0]
    are_whole_rows = tuple(destination.shape[1:]) == shape[1:]
    if are_whole_rows and _is_plain(destination, dtype):
        reader.read(span, base + first * row, _flat(destination).view(torch.uint8).numpy().data)
        return
    if row > PIECE_BYTES and len(shape) > 1:
        for number in range(count):
            _read(reader, span, base + (first + number) * row, shape[1:], offsets[1:], destination[number], dtype)
        return
    together = max(1, PIECE_BYTES // row)
    for begin in range(0, count, together):
        rows = min(together, count - begin)
        values = torch.empty((rows, *shape[1:]), dtype=dtype, device="cpu")
        reader.read(span, base + (first + begin) * row, values.view(-1).view(torch.uint8).numpy().data)
        reader.wait()
        for dim in range(1, len(shape)):
            values = values.narrow(dim, offsets[dim], destination.shape[dim])
        destination[begin : begin + rows].copy_(values)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension of stride 1, which ``view(-1)`` does not give for one element."""
    return tensor.as_strided((tensor.numel(),), (1,))
