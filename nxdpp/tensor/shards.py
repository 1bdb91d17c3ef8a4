"""Rows of parameters over data-parallel ranks: where they begin, and all rows of one parameter.

::

    rank 0    rows 0, 1, 2       DTensor of shape (7, 4), local rows (3, 4)
    rank 1    rows 3, 4, 5
    rank 2    row 6              a rank may have none

Under tensor parallelism the rows are of a tensor-parallel rank's part.
"""

from typing import cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from nxdpp.gradients.shards.local_tensors import local_rows, with_rows
from nxdpp.ranks.faults.waits import Wait
from nxdpp.tensor.tensor_attributes import copy_tensor_model_parallel_attributes


def is_divided_by_rows(tensor: DTensor) -> bool:
    """Return whether the last dimension of the mesh divides the rows of ``tensor``, and the others have copies."""
    *others, last = tensor.placements
    return last == Shard(0) and all(each == Replicate() for each in others)


def first_row(tensor: torch.Tensor) -> int:
    """Index of this rank's first row; 0 for a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0
    assert is_divided_by_rows(tensor)
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    # As torch.chunk divides them.
    return min(rows, -(-rows // mesh.size(-1)) * mesh.get_local_rank(mesh.ndim - 1))


def with_rows_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of ``whole``, in memory of their own, sharded as ``like`` is."""
    first, count = first_row(like), len(local_rows(like))
    return with_rows(like, whole.detach()[first : first + count].clone())


def all_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows of a sharded tensor in new memory, collective over its ranks; any other ``tensor`` itself.

    They are on the device of the mesh: rows that ``CPUOffloadPolicy`` keeps on the CPU have no backend there.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad(), Wait("rows of a sharded parameter", tensor.device_mesh.get_group(-1)):
        here = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
        rows = here.full_tensor()
    # With one rank they are its own memory.
    values = rows.clone() if tensor.device_mesh.size(-1) == 1 else rows
    copy_tensor_model_parallel_attributes(values, tensor)
    return values
