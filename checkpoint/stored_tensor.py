"""A tensor in a safetensors file, read from there without mapping the file into memory.

A file is 8 bytes with the length of a header, little-endian, the header, which is JSON, and the bytes of all tensors:
https://huggingface.co/docs/safetensors. The headers are checked by safetensors itself. Reading goes by offset, because
the pages of a mapped file count as resident memory of the process.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LENGTH_BYTES = 8
_PIECE = 2**22


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of ``shape`` and ``dtype`` whose bytes start at ``offset`` of the file ``path``."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def on_meta(self) -> torch.Tensor:
        """A tensor like it without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read_into(self, destination: torch.Tensor) -> None:
        """Read all values into ``destination``, of the same shape, on any device and of any dtype.

        Takes 32 MiB of memory where they are converted or go to another device, unless ``destination`` is not
        contiguous, which takes the bytes of a whole tensor. Raises ``OSError`` for a file that has become shorter.
        """
        assert destination.shape == self.shape
        destination = destination.detach()
        if not destination.is_contiguous():
            destination.copy_(self.read(self.dtype))
            return
        flat = destination.view(-1)
        if flat.device.type == "cpu" and flat.dtype is self.dtype:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                self._fill(file, flat)
            return
        start = 0
        for piece in self.pieces(flat.dtype):
            flat[start : start + len(piece)].copy_(piece)
            start += len(piece)

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The values in ``dtype``, on the CPU, at most 2**22 of them at once, in one dimension."""
        count = prod(self.shape)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, count, _PIECE):
                values = torch.empty(min(_PIECE, count - start), dtype=self.dtype)
                self._fill(file, values)
                yield values.to(dtype)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the CPU with the values in ``dtype``."""
        values = torch.empty(self.shape, dtype=dtype)
        self.read_into(values)
        return values

    def _fill(self, file: FileIO, values: torch.Tensor) -> None:
        memory = memory_of(values)
        while memory:
            count = file.readinto(memory)
            if not count:
                raise OSError(f"{self.path} ended before all its tensors were read: it was changed meanwhile.")
            memory = memory[count:]


def memory_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, of any dtype, in one dimension; no copy."""
    # Any: numpy's arrays have a buffer, which their annotations tell from Python 3.12 on.
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors file ``path``, by name; no values are read.

    Raises ``ValueError`` for a file that is truncated, corrupt, or has a tensor of a dtype that torch has not, and
    ``OSError`` for one that cannot be read.
    """
    try:
        with path.open("rb") as file, safe_open(path, framework="pt"):
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or corrupt ({error}); it has {path.stat().st_size} bytes. Copy or download it again."
        ) from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} in {path} has the dtype {entry['dtype']}, which cannot be loaded.")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        assert end - begin == prod(shape) * dtype.itemsize
        tensors[name] = StoredTensor(path, shape, dtype, _LENGTH_BYTES + length + begin)
    return tensors
