"""The parts of a model's tensors on each tensor and pipeline rank, without processes or memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from nxdpp.checkpoint.commands.meta_model import MetaModel, meta_model
from nxdpp.checkpoint.huggingface.model_tensors import tensors_of
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.padding import Range, ranges
from nxdpp.parallel_layers.tensor_attributes import is_tensor_parallel
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.tensor_parallel.parallelize import tensor_parallelize


@dataclass(frozen=True)
class Part:
    """Shape of a rank's tensor, and how it is divided.

    Attributes:
        shape: of the part.
        dim: divided dimension, -1 for a whole tensor.
        blocks: number of blocks that are divided each.
        count: number of different parts.
    """

    shape: tuple[int, ...]
    dim: int = -1
    blocks: int = 1
    count: int = 1

    def of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part ``rank`` of a divided ``whole``: a view of it, or with several blocks a copy."""
        chunks = [whole.narrow(self.dim, each.start, each.length) for each in self._ranges(rank)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, self.dim)

    def put(self, whole: torch.Tensor, rank: int, part: torch.Tensor) -> None:
        """Write the part ``rank`` to its place in a divided ``whole``."""
        for each in self._ranges(rank):
            whole.narrow(self.dim, each.start, each.length).copy_(part.narrow(self.dim, each.own, each.length))

    def _ranges(self, rank: int) -> list[Range]:
        size = self.shape[self.dim]
        return ranges(size * self.count, size, self.blocks, rank)


def parts_of(model: MetaModel, tensor: int, pipeline: int, origin: Path) -> list[dict[str, Part]]:
    """Return the parts of each of ``pipeline`` ranks, equal on the ``tensor`` ranks of it.

    The rules are those of ``tensor_parallelize`` and of ``NxDPPModel`` with its even cuts. Raises ``ValueError`` for a
    model that these refuse.
    """
    if tensor == pipeline == 1:
        return [{name: Part(tuple(value.shape)) for name, value in tensors_of(model.module).items()}]
    found = []
    for rank in range(pipeline):
        parallel_state.initialize_debug(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_rank=rank,
            pipeline_model_parallel_size=pipeline,
        )
        try:
            module = meta_model(model.texts, None, origin).module
            if tensor > 1:
                tensor_parallelize(module)
            local = module if pipeline == 1 else NxDPPModel(module).local_module
            found.append({name: _part(value) for name, value in tensors_of(local).items()})
        finally:
            parallel_state.destroy_model_parallel()
    return found


def check_not_ambiguous(parts: Mapping[str, Part], tensor: int, blocks: bool) -> None:
    """Raise ``ValueError`` for parts whose order in the whole is unknown; with ``blocks`` that of blocks is known."""
    for name, part in parts.items():
        if part.dim < 0:
            continue
        if part.blocks > 1 and not blocks:
            raise ValueError(
                f"{name} is divided in {part.blocks} blocks, and files of ranks do not tell them: other programs "
                f"divide it in other ways. If the ranks divide it as tensor_parallelize does, give --blocks. Else "
                f"convert with one tensor rank, or to another format."
            )
        if part.count != tensor:
            raise ValueError(
                f"{name} has {part.count} parts on {tensor} ranks, and files of ranks do not tell which have copies. "
                f"Convert with {part.count} tensor ranks, or to another format."
            )


def _part(tensor: torch.Tensor) -> Part:
    shape = tuple(tensor.shape)
    if not is_tensor_parallel(tensor):
        return Part(shape)
    attributes = vars(tensor)
    return Part(
        shape,
        attributes["partition_dim"] % tensor.ndim,
        attributes.get("partition_stride", 1),
        attributes["num_partitions"],
    )
