"""A tensor of the whole model, of which this rank has some rectangles, as torch.distributed.checkpoint takes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nxdpp.checkpoint.distributed.rectangles import Block, PlaceInWhole


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


def blocks_of(values: torch.Tensor, placement: PlaceInWhole, start: int = 0) -> TensorBlocks:
    """Return the rectangles of ``values``, elements of the rank's flattened tensor from ``start`` on."""
    return TensorBlocks(placement.shape, values.dtype, placement.blocks(values, start))


def whole(values: torch.Tensor) -> TensorBlocks:
    """Return a tensor that this rank has whole."""
    return TensorBlocks(tuple(values.shape), values.dtype, [Block((0,) * values.ndim, values)])


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.values.shape)


class BlocksSavePlanner(DefaultSavePlanner):
    """Plans which rank writes which rectangle: of replicas with the same one, the rank with the fewest bytes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of a rectangle of this rank."""
        return _values(self.state_dict, index)


class BlocksLoadPlanner(DefaultLoadPlanner):
    """Plans which saved rectangles a rank reads into its own."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Take the dict as it is: nothing in it is on the meta device."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        """Return the rectangle of this rank that is read into."""
        return _values(self.state_dict, index)


def key_of(index: MetadataIndex) -> str:
    """Name of a rectangle in the file of a rank."""
    offsets = index.offset or ()
    return index.fqn if not any(offsets) else f"{index.fqn}@{','.join(map(str, offsets))}"


def _values(state_dict: dict[str, Any], index: MetadataIndex) -> Any:
    blocks = state_dict[index.fqn]
    assert isinstance(blocks, TensorBlocks), "the dict has only rectangles"
    return blocks.__get_tensor_shard__(index)


def owners(tensors: Mapping[str, TensorBlocks], replicas: int) -> dict[str, int]:
    """Return the replica that writes or reads each of ``tensors``: all get about the same number of bytes."""
    filled = [0] * replicas
    found = {}
    for name, blocks in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        found[name] = filled.index(min(filled))
        filled[found[name]] += blocks.nbytes
    return found
