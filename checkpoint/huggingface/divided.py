"""Tensors of which a tensor-parallel rank holds a part, and that files hold whole."""

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
        """The part of ``whole``."""
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

    Raises ``NotImplementedError`` where several ranks hold one part.
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
    if getattr(tensor, "whole_size", padded) != padded:
        raise NotImplementedError(
            f"a parameter has {vars(tensor)['whole_size']} elements in {padded}, and files would have the padding too: "
            f"use local_state_dict() and load_local_state_dict() on each rank."
        )
    return Division(dim, parallel_state.get_tensor_model_parallel_rank(), count, stride)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of ``tensor`` in the files."""
    division = division_of(tensor)
    shape = list(tensor.shape)
    if division is not None:
        shape[division.dim] *= division.count
    return tuple(shape)


def as_in_files(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a meta tensor of the whole that it is a part of."""
    if division_of(tensor) is None:
        return tensor
    return torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor``; collective over the tensor group for a part."""
    division = division_of(tensor)
    return tensor.detach() if division is None else division.join(tensor)


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
