"""Tensors of which a tensor-parallel rank holds a part, and that files hold whole."""

import torch
from torch import nn

from nxdpp.checkpoint.files.safetensors_reader import Elements
from nxdpp.ranks import parallel_state
from nxdpp.tensor.embedding import ParallelEmbedding
from nxdpp.tensor.padding import own_ranges, whole_of
from nxdpp.tensor.tensor_attributes import is_tensor_parallel, whole_size


def division_of(tensor: torch.Tensor) -> Elements | None:
    """The elements that this rank has of the whole of ``tensor``, without padding; ``None`` for a whole one.

    Raises ``NotImplementedError`` where several ranks hold one part, and for blocks that are padded.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    if not is_tensor_parallel(tensor) or size == 1:
        return None
    count = getattr(tensor, "num_partitions", size)
    if count != size:
        raise NotImplementedError(
            f"a parameter has {count} parts over {size} tensor-parallel ranks, which checkpoints of Hugging Face "
            f"cannot have: use local_state_dict() and load_local_state_dict() on each rank."
        )
    dim, blocks = vars(tensor)["partition_dim"] % tensor.ndim, getattr(tensor, "partition_stride", 1)
    whole, padded = whole_size(tensor), tensor.shape[dim] * count
    if blocks > 1 and whole != padded:
        raise NotImplementedError(
            f"a parameter has {whole} elements in {padded}, padded in {blocks} blocks, and files "
            f"would have the padding too: use local_state_dict() and load_local_state_dict() on each rank."
        )
    ranges = own_ranges(tensor)
    return Elements(dim, tuple(each.start for each in ranges), ranges[0].length)


def as_in_files(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a meta tensor of the whole that it is a part of."""
    division = division_of(tensor)
    if division is None:
        return tensor
    shape = list(tensor.shape)
    shape[division.dim] = whole_size(tensor)
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor``; collective over the tensor group for a part."""
    return tensor.detach() if division_of(tensor) is None else whole_of(tensor)


def own_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of ``tensor`` that the whole has; padding becomes zero."""
    division, values = division_of(tensor), tensor.detach()
    if division is None or len(division.starts) > 1:
        return values
    own = division.length
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
