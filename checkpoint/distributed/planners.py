"""Planners of torch.distributed.checkpoint for dicts of ``TensorBlocks``."""

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from nxdpp.checkpoint.distributed.tensor_blocks import TensorBlocks


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
    assert isinstance(blocks, TensorBlocks), "the dict has rectangles alone"
    return blocks.__get_tensor_shard__(index)
