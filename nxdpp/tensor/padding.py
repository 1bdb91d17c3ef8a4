"""Padding of divided parameters: the elements of a part that the whole has, and parts of a larger padded whole.

A whole of 12 rows in 2 parts is padded to 16. The elements behind the whole are zero, and stay zero::

    whole     0 1 2 3 4 5 6 7 8 9 10 11
    before    rank 0: 0 .. 5            rank 1: 6 .. 11
    after     rank 0: 0 .. 7            rank 1: 8 .. 11, 4 of padding

With ``partition_stride`` blocks each block is padded on its own.
"""

from typing import NamedTuple

import torch
from torch import nn

from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import all_gather
from nxdpp.tensor.move_model_to_device import keep_attributes
from nxdpp.tensor.tensor_attributes import copies_of, whole_size


class Range(NamedTuple):
    """Elements of a block: ``length`` of them, from ``start`` on in the whole and from ``own`` on in the part."""

    start: int
    own: int
    length: int


def own_ranges(parameter: torch.Tensor) -> list[Range]:
    """The elements along ``partition_dim`` that this rank has of each block of the whole."""
    blocks = getattr(parameter, "partition_stride", 1)
    rank = parallel_state.get_tensor_model_parallel_rank() // copies_of(parameter)
    return ranges(whole_size(parameter), parameter.shape[vars(parameter)["partition_dim"]], blocks, rank)


def ranges(whole: int, part: int, blocks: int, rank: int) -> list[Range]:
    """The ranges of a part of ``part`` elements, of a whole of ``whole`` in ``blocks`` blocks."""
    block, chunk = whole // blocks, part // blocks
    count = max(0, min(chunk, block - rank * chunk))
    return [Range(i * block + min(rank * chunk, block), i * chunk, count) for i in range(blocks)]


def copy_own(whole: torch.Tensor, part: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy what ``parameter`` has of ``whole`` to ``part``, of its shape; padding in ``part`` stays as it is."""
    dim = vars(parameter)["partition_dim"]
    for start, own, count in own_ranges(parameter):
        part.narrow(dim, own, count).copy_(whole.narrow(dim, start, count))


def padded_part(parameter: nn.Parameter, padded: int) -> nn.Parameter:
    """Return this rank's part of the whole of ``parameter`` that is padded to ``padded`` elements.

    Collective over the tensor group, unless the parameter is on the meta device. The whole is in memory meanwhile.
    ``padded`` is a multiple of parts times blocks.
    """
    attributes = vars(parameter)
    dim, parts = attributes["partition_dim"], attributes["num_partitions"]
    shape = list(parameter.shape)
    shape[dim] = padded // parts
    result = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device), parameter.requires_grad)
    keep_attributes(parameter, result)
    if not parameter.is_meta:
        with torch.no_grad():
            copy_own(whole_of(parameter), result, result)
    return result


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, without padding, of which ``parameter`` is a part; collective over the tensor group."""
    attributes = vars(parameter)
    dim, blocks = attributes["partition_dim"] % parameter.ndim, attributes.get("partition_stride", 1)
    size = parallel_state.get_tensor_model_parallel_size()
    parts = attributes.get("num_partitions", size)
    gathered = all_gather(parameter.detach(), dim)
    # By rank, copy, block and element; the whole is by block, rank and element.
    chunk = parameter.shape[dim] // blocks
    by_block = gathered.unflatten(dim, (parts, size // parts, blocks, chunk)).select(dim + 1, 0).transpose(dim, dim + 1)
    padded = by_block.flatten(dim + 1, dim + 2)
    whole: torch.Tensor = padded.narrow(dim + 1, 0, whole_size(parameter) // blocks).flatten(dim, dim + 1)
    return whole
