"""The tensors of a document, each value checked: the rectangles of a tensor cover it, and none is outside of it.

A checkpoint can come from elsewhere. Its document may have any JSON, and a load must not read, allocate or leave out
anything because of it.
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxdpp.checkpoint.distributed.scalars import dtype_named
from nxdpp.checkpoint.files.checksummed import PIECE_BYTES, DamagedFile, Span, holds_dtype

DIGITS = 8
"""Hexadecimal digits of a checksum."""
_CHECKSUMS = re.compile(rf"([0-9a-f]{{{DIGITS}}})*")
_SUFFIX = ".safetensors"
_LONGEST_NAME = 255
_END = 2**63


def metadata_of(tensors: Mapping[str, Any]) -> Metadata:
    """Return the description of ``tensors``, JSON of a document.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``AttributeError`` for what no save writes.
    """
    described: dict[str, Any] = {}
    spans: dict[MetadataIndex, Span] = {}
    for name, tensor in tensors.items():
        dtype, shape = dtype_named(tensor["dtype"]), _numbers(tensor["shape"], f"the shape of {name}")
        if not holds_dtype(dtype) or prod(shape) * dtype.itemsize >= _END:
            raise ValueError(f"{name} has {dtype} and shape {list(shape)!r:.100}, which no file has")
        chunks = []
        for block in tensor["blocks"]:
            offsets, sizes = (_numbers(block[key], f"{key} of a block of {name}") for key in ("offsets", "sizes"))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            spans[MetadataIndex(name, chunks[-1].offsets)] = _span(name, block, prod(sizes) * dtype.itemsize)
        _check_cover(name, shape, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    return Metadata(state_dict_metadata=described, storage_data=spans)


def check_files(folder: Path, metadata: Metadata) -> None:
    """Raise ``DamagedFile`` for a file in ``folder`` that is missing, is no file, or lacks bytes of ``metadata``."""
    ends: dict[str, int] = {}
    for span in metadata.storage_data.values():
        ends[span.file] = max(ends.get(span.file, 0), span.start + span.length)
    for name, end in ends.items():
        path = folder / name
        try:
            found = os.stat(path)
        except FileNotFoundError as error:
            raise DamagedFile(
                f"{path} is missing, or this host does not share the directory with the ranks that saved."
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFile(f"{path} is not a file.")
        if found.st_size < end:
            raise DamagedFile(f"{path} is truncated: it has {found.st_size} bytes, and {end} are needed.")


def _span(name: str, block: Mapping[str, Any], length: int) -> Span:
    file, start, text = block["file"], block["start"], block["checksums"]
    is_name = isinstance(file, str) and file.isprintable() and Path(file).name == file and file.endswith(_SUFFIX)
    if not is_name or len(file.encode()) > _LONGEST_NAME:
        raise ValueError(f"a block of {name} is in the file {file!r:.100}")
    if type(start) is not int or not 0 <= start < _END - length:
        raise ValueError(f"a block of {name} begins at byte {start!r:.100}")
    if not isinstance(text, str) or not _CHECKSUMS.fullmatch(text) or len(text) != -(-length // PIECE_BYTES) * DIGITS:
        raise ValueError(f"a block of {name} has checksums {text!r:.100} for {length} bytes")
    return Span(file, start, length, tuple(int(text[at : at + DIGITS], 16) for at in range(0, len(text), DIGITS)))


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(each) is not int or not 0 <= each < _END for each in value):
        raise ValueError(f"{what} is {value!r:.100}")
    return tuple(value)


_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def _check_cover(name: str, shape: tuple[int, ...], blocks: Sequence[_Rectangle]) -> None:
    """Raise ``ValueError`` unless each element of ``shape`` is in one of ``blocks`` and in no other."""
    if len(blocks) == 1 and blocks[0] == ((0,) * len(shape), shape):
        return
    for offsets, sizes in blocks:
        are_inside = len(offsets) == len(sizes) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not are_inside:
            raise ValueError(f"a block of {name} at {list(offsets)} of {list(sizes)} is outside of {list(shape)}")
    if sum(prod(sizes) for _, sizes in blocks) != prod(shape):
        raise ValueError(f"the blocks of {name} do not have the elements of {list(shape)}")
    ordered = sorted(blocks)
    for number, (offsets, sizes) in enumerate(ordered):
        for others, other_sizes in ordered[number + 1 :]:
            if not shape or others[0] >= offsets[0] + sizes[0]:
                break
            if all(
                max(one, other) < min(one + size, other + other_size)
                for one, size, other, other_size in zip(offsets, sizes, others, other_sizes, strict=True)
            ):
                raise ValueError(f"two blocks of {name} have the elements at {list(others)}")
