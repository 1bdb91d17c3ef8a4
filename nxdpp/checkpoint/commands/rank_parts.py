"""The parts of a model's tensors on each tensor and pipeline rank, without processes or memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nxdpp.checkpoint.commands.source import MetaModel, meta_model
from nxdpp.checkpoint.files.layout import StoredLayout, layout_of
from nxdpp.checkpoint.files.rank_file import RankFile
from nxdpp.checkpoint.huggingface.model_tensors import tensors_of
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.parallelize import tensor_parallelize
from nxdpp.tensor.padding import Range, ranges
from nxdpp.tensor.tensor_attributes import is_tensor_parallel


@dataclass(frozen=True)
class RankPart:
    """Shape of a rank's tensor, and how it is divided.

    Attributes:
        shape: of the part.
        dim: divided dimension, -1 for a whole tensor.
        blocks: number of blocks, each of which is divided.
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


def parts_of(model: MetaModel, tensor: int, pipeline: int, origin: Path) -> list[dict[str, RankPart]]:
    """Return the parts of each of ``pipeline`` ranks, equal on all its ``tensor`` ranks.

    The model is divided as by ``tensor_parallelize`` and by ``NxDPPModel`` with its even cuts. Raises ``ValueError``
    for a model that these refuse.
    """
    if tensor == pipeline == 1:
        return [{name: RankPart(tuple(value.shape)) for name, value in tensors_of(model.module).items()}]
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


def check_not_ambiguous(parts: Mapping[str, RankPart], tensor: int, blocks: bool) -> None:
    """Raise ``ValueError`` for parts in an unknown order; with ``blocks`` the order of blocks is known."""
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


def _part(tensor: torch.Tensor) -> RankPart:
    shape = tuple(tensor.shape)
    if not is_tensor_parallel(tensor):
        return RankPart(shape)
    attributes = vars(tensor)
    return RankPart(
        shape,
        attributes["partition_dim"] % tensor.ndim,
        attributes.get("partition_stride", 1),
        attributes["num_partitions"],
    )


class Whole:
    """A tensor of which each of ``files`` has a part or a copy, by its shape.

    Args:
        name: of the tensor in the files.
        files: of the tensor ranks in order.
        expected: whole shape by the configuration.
        blocks: number of blocks along the divided dimension, each of which is divided.

    Raises ``ValueError`` for shapes that do not make this whole, or could make it in several ways.
    """

    def __init__(self, name: str, files: Sequence[RankFile], expected: tuple[int, ...], blocks: int) -> None:
        self._name = name
        self._files = files
        kinds = {file.layouts.get(name) for file in files}
        found = kinds.pop()
        if kinds or found is None:
            raise ValueError(f"{name} is not of one shape and dtype on all tensor ranks: give the files of one save.")
        dim = _divided_dim(name, found.shape, expected, len(files))
        self._part = RankPart(found.shape, dim, blocks, len(files))
        self.layout = StoredLayout(expected, found.dtype)

    def read(self) -> torch.Tensor:
        """Return the values."""
        values = torch.empty(self.layout.shape, dtype=self.layout.dtype)
        if not self._is_divided:
            self._files[0].read(self._name, values)
            return values
        for rank, file in enumerate(self._files):
            if self._part.blocks == 1:
                file.read(self._name, self._part.of(values, rank))
                continue
            part = torch.empty(self._part.shape, dtype=self.layout.dtype)
            file.read(self._name, part)
            self._part.put(values, rank, part)
        return values

    def check_equal(self, name: str, files: Sequence[RankFile]) -> None:
        """Raise ``ValueError`` unless ``files`` have the same values under ``name``, and all copies are equal."""
        if self._is_divided and name == self._name and files is self._files:
            return
        values = self.read()
        for rank, file in enumerate(files):
            own = self._part.of(values, rank) if self._is_divided else values
            if file.layouts.get(name) != layout_of(own) or not file.equals(name, own):
                raise ValueError(
                    f"{name} on tensor rank {rank} differs from {self._name} on rank 0 or on another stage, and the "
                    f"configuration's model has one tensor there: give the configuration of the model that was saved."
                )

    @property
    def _is_divided(self) -> bool:
        return self._part.dim >= 0


def _divided_dim(name: str, shape: tuple[int, ...], expected: tuple[int, ...], ranks: int) -> int:
    """The dimension along which a tensor is divided; -1 where each rank has the whole."""
    if shape == expected:
        return -1
    dims = [dim for dim, size in enumerate(shape) if len(shape) == len(expected) and size != expected[dim]]
    if len(dims) == 1 and shape[dims[0]] * ranks == expected[dims[0]]:
        return dims[0]
    raise ValueError(
        f"{name} is of shape {list(shape)} on each of {ranks} tensor ranks, and of {list(expected)} by the "
        f"configuration: copies, padding and other divisions are not known from files."
    )
