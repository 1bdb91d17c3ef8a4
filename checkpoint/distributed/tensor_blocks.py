"""A tensor of the whole model, of which this rank has some rectangles, as torch.distributed.checkpoint takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nxdpp.checkpoint.distributed.rectangles import Block, Placement


@dataclass(frozen=True)
class TensorBlocks:
    """Rectangles of a tensor of global ``shape`` in this rank's memory.

    The planner of torch.distributed.checkpoint knows such objects by three methods (``_Checkpointable``), and divides
    saved rectangles anew for those that a rank loads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Sequence[Block]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's rectangles."""
        return sum(block.values.nbytes for block in self.blocks)

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
        offsets = tuple(index.offset or ())
        return next(block.values for block in self.blocks if block.offsets == offsets)


def blocks_of(values: torch.Tensor, placement: Placement, start: int = 0) -> TensorBlocks:
    """Return the rectangles of ``values``, elements of the rank's flattened tensor from ``start`` on."""
    return TensorBlocks(placement.shape, values.dtype, placement.blocks(values, start))


def whole(values: torch.Tensor) -> TensorBlocks:
    """Return a tensor that this rank has whole."""
    return TensorBlocks(tuple(values.shape), values.dtype, [Block((0,) * values.ndim, values)])


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.values.shape)
