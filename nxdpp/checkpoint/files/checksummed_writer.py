"""Safetensors files that are written in pieces, with a checksum of each piece.

A file is written tensor by tensor, so that only a piece of one is copied to the memory of the host. The checksums are
returned: a checkpoint keeps them in its document, outside the files.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from nxdpp.checkpoint.files import pieces
from nxdpp.checkpoint.files.pieces import FileSpan, StoredLayout, layout_of, layouts_of
from nxdpp.devices.kinds import readable

_BEHIND_BYTES = 32 << 20
"""Bytes of the page cache whose transfer to the disk begins together."""

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip


def holds_dtype(dtype: torch.dtype) -> bool:
    """Return whether a training's checkpoint can have a tensor of ``dtype``: two numbers in a byte are refused."""
    return dtype in _NAMES and dtype != torch.float4_e2m1fn_x2


def check_dtype(name: str, dtype: torch.dtype, packed: bool = False) -> None:
    """Raise ``ValueError`` for a ``dtype`` that a file cannot have: two numbers in a byte need ``packed``."""
    if dtype not in _NAMES or not (packed or holds_dtype(dtype)):
        raise ValueError(f"{name} is of {dtype}, which a checkpoint cannot hold: convert it first.")


def write_checksummed(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileSpan]:
    """Write ``tensors`` to the safetensors file ``path``, and return the place of each; see ``write_streamed``."""
    return write_streamed(path, layouts_of(tensors), tensors.items())


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` to a new file ``path`` in the place of an earlier one; see ``write_streamed``.

    Wide elements come first, as in files of the library: so all tensors are aligned.
    """
    path.unlink(missing_ok=True)
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    try:
        values = ((name, readable(tensor)) for name, tensor in ordered.items())
        write_streamed(path, layouts_of(ordered), values, packed=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def write_streamed(
    path: Path, layouts: Mapping[str, StoredLayout], tensors: Iterable[tuple[str, torch.Tensor]], packed: bool = False
) -> dict[str, FileSpan]:
    """Write ``tensors``, which have the names and order of ``layouts``, and return the place of each.

    One tensor is taken at a time. The file is new, and on the disk when this returns. Values of another device, or not
    contiguous, are copied piece by piece.

    Raises ``ValueError`` as ``check_dtype`` does, and ``OSError`` if the file cannot be written.
    """
    for name, layout in layouts.items():
        check_dtype(name, layout.dtype, packed)
    text = json.dumps(header_of(layouts), separators=(",", ":")).encode()
    # The format asks for data that is aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    spans = {}
    expected = iter(layouts.items())
    # A new file: no link or pipe in its place is written to.
    with path.open("xb") as file, ThreadPoolExecutor(1) as pool:
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
            spans[name] = FileSpan(path.name, at - tensor.nbytes, tensor.nbytes, tuple(checksums))
        assert next(expected, None) is None, "a planned tensor is missing"
        file.flush()
        os.fsync(file.fileno())
    return spans


def header_of(layouts: Mapping[str, StoredLayout]) -> dict[str, object]:
    """Return the header of a file that has tensors of ``layouts``, in their order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, layout in layouts.items():
        offsets = [end, end + layout.bytes]
        header[name] = {"dtype": _NAMES[layout.dtype], "shape": _shape(layout), "data_offsets": offsets}
        end += layout.bytes
    return header


def _shape(layout: StoredLayout) -> list[int]:
    """The shape in the header of a file, which counts both numbers in a byte of ``float4_e2m1fn_x2``."""
    *dims, last = layout.shape or (1,)
    return [*dims, 2 * last] if layout.dtype == torch.float4_e2m1fn_x2 else list(layout.shape)


def _write_piece(file: BinaryIO, piece: memoryview, pool: Executor) -> int:
    """Write ``piece`` while another thread takes its checksum, which is returned."""
    if len(piece) < pieces.SMALL_BYTES:
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
        # Only advice: a file system that ignores it still has fsync.
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _pieces(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The bytes of ``tensor`` in pieces of ``PIECE_BYTES``, the last one shorter."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    count = pieces.PIECE_BYTES // tensor.element_size()
    values = pieces.flat(tensor)
    for start in range(0, values.numel(), count):
        yield pieces.bytes_of(values[start : start + count].cpu())
