"""Tensors of which a tensor-parallel rank holds a part, and that files hold whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.checkpoint.files.safetensors_reader import Part
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.collectives import all_gather
from nxdpp.parallel_layers.embedding import ParallelEmbedding


@dataclass(frozen=True)
class Division(Part):
    """This rank's part of a tensor."""

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of ``whole``, without padding."""
        if self.padded:
            return whole.narrow(self.dim, *self.own(whole.shape[self.dim]))
        chunks = torch.chunk(whole, self.count * self.stride, self.dim)
        return torch.cat(chunks[self.index :: self.count], self.dim)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from the parts of all ranks; collective over the tensor group."""
        gathered = all_gather(part.detach(), self.dim)
        if self.stride == 1:
            return gathered
        # The parts come by rank and block; the whole has them by block and rank.
        chunks = torch.chunk(gathered, self.count * self.stride, self.dim)
        return torch.cat([chunk for block in range(self.stride) for chunk in chunks[block :: self.stride]], self.dim)


def division_of(tensor: torch.Tensor) -> Division | None:
    """Division of ``tensor`` over the tensor-parallel ranks; ``None`` for a whole one.

    Raises ``NotImplementedError`` where several ranks hold one part, and for blocks that are padded.
    """
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    size = parallel_state.get_tensor_model_parallel_size()
    count = getattr(tensor, "num_partitions", size)
    if size == 1:
        return None
    if count != size:
        raise NotImplementedError(
            f"a parameter has {count} parts over {size} tensor-parallel ranks, which checkpoints of Hugging Face "
            f"cannot have: use local_state_dict() and load_local_state_dict() on each rank."
        )
    dim, stride = vars(tensor)["partition_dim"], getattr(tensor, "partition_stride", 1)
    padded = tensor.shape[dim] * count
    if whole_size(tensor, dim, count) == padded:
        padded = 0
    elif stride > 1:
        raise NotImplementedError(
            f"a parameter has {vars(tensor)['whole_size']} elements in {padded}, padded in {stride} blocks, and files "
            f"would have the padding too: use local_state_dict() and load_local_state_dict() on each rank."
        )
    return Division(dim, parallel_state.get_tensor_model_parallel_rank(), count, stride, padded)


def whole_size(tensor: torch.Tensor, dim: int, count: int) -> int:
    """Number of elements of the whole along ``dim``, without padding."""
    size: int = getattr(tensor, "whole_size", tensor.shape[dim] * count)
    return size


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of ``tensor`` in the files."""
    division = division_of(tensor)
    shape = list(tensor.shape)
    if division is not None:
        shape[division.dim] = whole_size(tensor, division.dim, division.count)
    return tuple(shape)


def as_in_files(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a meta tensor of the whole that it is a part of."""
    if division_of(tensor) is None:
        return tensor
    return torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor``; collective over the tensor group for a part."""
    division = division_of(tensor)
    if division is None:
        return tensor.detach()
    return division.join(tensor).narrow(division.dim, 0, whole_size(tensor, division.dim, division.count))


def own_elements(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Elements of ``tensor`` that a whole of ``shape`` has; padding becomes zero."""
    division, values = division_of(tensor), tensor.detach()
    if division is None or not division.padded:
        return values
    own = division.own(shape[division.dim])[1]
    values.narrow(division.dim, own, values.shape[division.dim] - own).zero_()
    return values.narrow(division.dim, 0, own)


def check_no_padding(module: nn.Module) -> None:
    """Raise ``NotImplementedError`` for an embedding with rows behind its vocabulary."""
    for name, child in module.named_modules():
        if not isinstance(child, ParallelEmbedding):
            continue
        rows = child.num_embeddings_per_partition * child.tensor_parallel_size
        if rows != child.num_embeddings:
            raise NotImplementedError(
                f"{name} has {child.num_embeddings} tokens in {rows} rows, of which files would have the "
                f"{rows - child.num_embeddings} of padding too: use local_state_dict() on each rank."
            )
