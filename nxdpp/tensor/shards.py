"""Parameters of which each data-parallel rank has some rows: DTensors of torch's ``fully_shard``.

::

    rank 0    rows 0, 1, 2       DTensor of shape (7, 4), local tensor (3, 4)
    rank 1    rows 3, 4, 5
    rank 2    row 6              a rank may have none

Under tensor parallelism the rows are those of a tensor-parallel rank's part.
"""

from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nxdpp.ranks.faults.waits import Wait
from nxdpp.tensor.tensor_attributes import copy_tensor_model_parallel_attributes


def is_shard(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor, of which a rank has a shard."""
    return isinstance(tensor, DTensor)


def has_rows(tensor: torch.Tensor) -> bool:
    """Return whether a DTensor is divided by rows over one dimension of its mesh, and a copy along others before it."""
    if not isinstance(tensor, DTensor):
        return False
    *others, last = tensor.placements
    return last == Shard(0) and all(each == Replicate() for each in others)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank: the rows of a shard, without autograd, or ``tensor`` itself."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: torch.Tensor) -> int:
    """Index of this rank's first row; 0 for a tensor that is no shard."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offsets[0])


def own_rows(values: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``values``, all of a tensor, that this rank has of ``shard``: a view."""
    return values.narrow(0, min(first_row(shard), len(values)), len(local_of(shard)))


def as_shard(values: torch.Tensor, shard: DTensor) -> DTensor:
    """Return the rows of ``values``, all of a tensor, that this rank has of ``shard``, in memory of their own."""
    return DTensor.from_local(
        own_rows(values.detach(), shard).clone(),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows of a shard in new memory, collective over its ranks; any other ``tensor`` itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad(), Wait("rows of a sharded parameter", tensor.device_mesh.get_group(-1)):
        # A shard of one rank gives its own memory.
        rows = tensor.full_tensor()
        values = rows.clone() if tensor.device_mesh.size(-1) == 1 else rows
    copy_tensor_model_parallel_attributes(values, tensor)
    return values
