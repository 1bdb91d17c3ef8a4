"""Rectangles of tensors: flat ranges of a tensor, and parts of a tensor that tensor parallelism divides.

A checkpoint has each tensor in rectangles of the whole. A ZeRO-1 shard is a flat range of a rank's part, and becomes a
few rectangles; rows of ``fully_shard`` become one. Here a range of a part of 4 x 5 elements becomes three::

    . . . 1 1
    2 2 2 2 2
    2 2 2 2 2
    3 3 . . .

torch.distributed.checkpoint plans which rank writes which rectangle, and which saved ones a rank reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.ranks import parallel_state
from nxdpp.tensor.padding import Range, own_ranges
from nxdpp.tensor.shards import first_row
from nxdpp.tensor.tensor_attributes import is_tensor_parallel, whole_size


class Block(NamedTuple):
    """A rectangle of a whole tensor: its first element, and its values in memory of the rank."""

    offsets: tuple[int, ...]
    values: torch.Tensor

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the rectangle in the whole."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.values.shape, strict=True))


class PlaceInWhole(NamedTuple):
    """The place of a rank's tensor, of ``local_shape``, in the whole of ``shape`` without padding.

    ``dim`` is the divided dimension, -1 for a whole tensor. The rank has the elements ``ranges`` along it. The rest of
    its tensor is padding. Of a shard of ``fully_shard`` the rank has only the rows from element ``begin`` on.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]
    begin: int = 0

    def blocks(self, values: torch.Tensor, start: int = 0) -> list[Block]:
        """Return ``values`` as rectangles of the whole, which are views of it.

        They have ``local_shape``, or are contiguous elements of the flattened tensor, from ``begin`` and ``start`` on.
        """
        values = local_rows(values.detach())
        if tuple(values.shape) == self.local_shape:
            return list(self._in_whole((0,) * values.ndim, values))
        flat, start = values.view(-1), self.begin + start
        found: list[Block] = []
        for first, offsets, sizes in rectangles(self.local_shape, start, start + flat.numel()):
            local = flat[first - start : first - start + prod(sizes)].view(sizes)
            found += self._in_whole(offsets, local)
        return found

    def part_of(self, whole: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the rank's part of ``whole``, a new tensor; ``whole`` itself if that is not divided.

        With ``stop`` it is elements ``start`` to ``stop`` of the flattened part, of shape ``(stop - start,)``.
        """
        if self.dim < 0 and stop is None:
            return whole
        part = whole.new_zeros(self.local_shape if stop is None else (stop - start,))
        for block in self.blocks(part, start):
            block.values.copy_(whole[block.region])
        return part

    def _in_whole(self, offsets: tuple[int, ...], local: torch.Tensor) -> Iterator[Block]:
        if self.dim < 0:
            yield Block(offsets, local)
            return
        dim = self.dim
        begin, end = offsets[dim], offsets[dim] + local.shape[dim]
        for start, own, length in self.ranges:
            low, high = max(begin, own), min(end, own + length)
            if low < high:
                place = (*offsets[:dim], start + low - own, *offsets[dim + 1 :])
                yield Block(place, local.narrow(dim, low - begin, high - low))


def placement_of(tensor: torch.Tensor) -> PlaceInWhole:
    """Return the place of a parameter or buffer of this rank in the whole.

    It follows from the attributes of tensor and expert parallelism and from the rows of a shard.
    """
    shape = tuple(tensor.shape)
    begin = first_row(tensor) * prod(shape[1:])
    if is_of_experts(tensor):
        ranks, own = parallel_state.get_expert_model_parallel_size(), parallel_state.get_expert_model_parallel_rank()
        experts, *others = shape
        return PlaceInWhole((experts * ranks, *others), shape, 0, (Range(own * experts, 0, experts),), begin)
    is_divided = is_tensor_parallel(tensor) and (
        hasattr(tensor, "whole_size") or parallel_state.get_tensor_model_parallel_size() > 1
    )
    if not is_divided:
        return PlaceInWhole(shape, shape, -1, (), begin)
    dim = vars(tensor)["partition_dim"] % tensor.ndim
    whole = list(shape)
    whole[dim] = whole_size(tensor)
    return PlaceInWhole(tuple(whole), shape, dim, tuple(own_ranges(tensor)), begin)


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Divide elements ``start`` to ``stop`` of a flattened tensor of ``shape`` into rectangles, in order.

    Gives for each its first element in the flattened tensor, its offsets and its sizes: at most 2 n - 1 for n
    dimensions.
    """
    if start == stop:
        # A tensor without elements is one rectangle. An empty range of any other tensor gives none.
        if prod(shape) == 0:
            yield 0, (0,) * len(shape), shape
        return
    if not shape:
        yield start, (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # The range begins and ends in one row.
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield first * row, (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    base = index * prod(shape[1:])
    for first, offsets, sizes in rectangles(shape[1:], start - base, stop - base):
        yield base + first, (index, *offsets), (1, *sizes)


@dataclass(frozen=True)
class TensorBlocks:
    """Rectangles of a tensor of global ``shape`` in this rank's memory.

    The planner of torch.distributed.checkpoint knows such objects by three methods (``_Checkpointable``), and divides
    saved rectangles to fit the ones that a rank loads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Sequence[Block]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's rectangles."""
        return sum(block.values.nbytes for block in self.blocks)

    def described(self) -> object:
        """The places and strides of the rectangles, for a comparison with other ranks."""
        blocks = [(each.offsets, tuple(each.values.shape), each.values.is_contiguous()) for each in self.blocks]
        return self.shape, str(self.dtype), blocks

    def size(self) -> torch.Size:
        """Global shape, which the planner compares."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(block.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(block), properties=properties, size=self.size()),
            )
            for block in self.blocks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(block) for block in self.blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The values of a rectangle of this rank."""
        offsets = tuple(index.offset or ())
        return next(block.values for block in self.blocks if block.offsets == offsets)


def blocks_of(values: torch.Tensor, placement: PlaceInWhole, start: int = 0) -> TensorBlocks:
    """Return the rectangles of ``values``, elements of the rank's flattened tensor from ``start`` on."""
    return TensorBlocks(placement.shape, values.dtype, placement.blocks(values, start))


def whole(values: torch.Tensor) -> TensorBlocks:
    """Return a tensor that this rank has whole."""
    return TensorBlocks(tuple(values.shape), values.dtype, [Block((0,) * values.ndim, values)])


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.values.shape)


def key_of(index: MetadataIndex) -> str:
    """Name of a rectangle in the file of a rank."""
    offsets = index.offset or ()
    return index.fqn if not any(offsets) else f"{index.fqn}@{','.join(map(str, offsets))}"
