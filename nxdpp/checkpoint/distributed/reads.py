"""Reads of saved rectangles: at once, or in two phases around the agreement of all ranks.

::

    verify    new memory          read                 ┐ all ranks  ┌
              fits on the host    read, kept           ├ have ──────┤ copied       apply
              does not fit        read piece by piece  ┘ verified   └ read again

Until ``apply`` no memory in use has changed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from nxdpp.checkpoint.distributed.document import tensors_of
from nxdpp.checkpoint.distributed.rectangles import TensorBlocks
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader
from nxdpp.checkpoint.files.pieces import FileSpan, read_region, verify_region
from nxdpp.checkpoint.files.torch_saves import SavedSpan


class _Read(NamedTuple):
    """A rectangle of the saved tensor ``name``, with its place in the saved rectangle of ``shape`` that has it."""

    name: str
    span: FileSpan
    shape: Sequence[int]
    dtype: torch.dtype
    offsets: Sequence[int]
    destination: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.destination.numel() * self.dtype.itemsize

    def into(self, destination: torch.Tensor, reader: ChecksummedReader) -> None:
        """Read into ``destination``, which has its values after ``reader.wait``."""
        read_region(partial(reader.read, self.span), self.shape, self.dtype, self.offsets, destination, reader.wait)

    def verify(self, reader: ChecksummedReader) -> None:
        """Read piece by piece, and keep nothing."""

        def read(start: int, into: memoryview) -> None:
            reader.read(self.span, start, into)
            reader.wait()

        verify_region(read, self.shape, self.dtype, self.offsets, self.destination.shape)


def read_tensors(folder: Path, metadata: Metadata, tensors: Mapping[str, TensorBlocks]) -> None:
    """Read saved rectangles into ``tensors`` in the order of the files; raises ``DamagedFile`` and ``OSError``."""
    with ChecksummedReader(folder) as reader:
        for each in _reads(folder, metadata, tensors):
            each.into(each.destination, reader)


class VerifiedReads:
    """Reads into ``tensors`` by name, which begin to change when all ranks have verified what they read.

    Nothing uses the memory of the ones in ``new`` yet. New memory and kept values may take ``room`` bytes of host
    memory. What has no room is read twice. ``elsewhere`` is as of ``ChecksummedReader``.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Metadata,
        tensors: Mapping[str, TensorBlocks],
        new: Collection[str],
        room: int,
        elsewhere: Callable[[Path, int, memoryview], int] | None = None,
    ) -> None:
        self._open = partial(ChecksummedReader, folder, elsewhere)
        self._reads = list(_reads(folder, metadata, tensors))
        self._new = new
        self._room = room - sum(each.bytes for each in self._reads if each.name in new)
        self._kept: list[tuple[_Read, torch.Tensor]] = []
        self._again: list[_Read] = []

    def verify(self) -> None:
        """Read all bytes and compare their checksums. Raises ``DamagedFile`` and ``OSError``."""
        with self._open() as reader:
            for each in self._reads:
                if each.name in self._new:
                    each.into(each.destination, reader)
                elif each.bytes <= self._room:
                    values = torch.empty(each.destination.shape, dtype=each.dtype, device="cpu")
                    self._room -= each.bytes
                    self._kept.append((each, values))
                    each.into(values, reader)
                else:
                    self._again.append(each)
                    each.verify(reader)

    def apply(self) -> None:
        """Give the memory in use its values. Raises as ``verify`` does for files that have changed since."""
        while self._kept:
            each, values = self._kept.pop()
            each.destination.copy_(values)
        with self._open() as reader:
            for each in self._again:
                each.into(each.destination, reader)


def _reads(folder: Path, metadata: Metadata, tensors: Mapping[str, TensorBlocks]) -> Iterator[_Read]:
    """The reads of ``tensors``, in the order of the files."""
    spans: Mapping[MetadataIndex, FileSpan | SavedSpan] = metadata.storage_data
    described = tensors_of(metadata)
    plan = create_default_local_load_plan(dict(tensors), metadata)
    for item in sorted(plan.items, key=lambda item: spans[item.storage_index][:2]):
        index = item.storage_index
        saved = described[index.fqn]
        assert index.index is not None, "the plan gives the place among the rectangles"
        block = tensors[index.fqn].__get_tensor_shard__(item.dest_index)
        part = tuple(slice(at, at + size) for at, size in zip(item.dest_offsets, item.lengths, strict=True))
        shape, dtype = saved.chunks[index.index].sizes, saved.properties.dtype
        span = spans[index]
        if isinstance(span, SavedSpan):
            span = span.values(folder, index.fqn, shape, dtype)
        yield _Read(index.fqn, span, shape, dtype, item.storage_offsets, block[part])
