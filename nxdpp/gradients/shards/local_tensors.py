"""This rank's rows of sharded tensors, which are DTensors of torch."""

from typing import NamedTuple, TypeGuard

import torch
from torch.distributed.tensor import DTensor


class LocalGradient(NamedTuple):
    """The rows of a gradient on this rank, for functions of torch that read ``.grad`` of parameters."""

    grad: torch.Tensor


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether this rank has only its rows of ``tensor``."""
    return isinstance(tensor, DTensor)


def is_of_shards(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is sharded, or whole for as long as a step needs it."""
    return is_sharded(tensor) or hasattr(tensor, "gathered_for_a_step")


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, in its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


def with_rows(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` as a tensor that is sharded as ``like`` is; as they are where ``like`` is not."""
    if not isinstance(like, DTensor):
        return rows
    if like.is_cpu and like.device_mesh.device_type != "cpu":
        # Rows that ``CPUOffloadPolicy`` keeps in host memory. DTensor.from_local would move them to the mesh's device.
        offloaded = torch.empty_like(like, dtype=rows.dtype)
        local_rows(offloaded).copy_(rows)
        return offloaded
    sharded: torch.Tensor = DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded
