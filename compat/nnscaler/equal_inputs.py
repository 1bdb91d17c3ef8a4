"""Comparison of the inputs of tensor-parallel ranks: a sampler that divides data over them gives wrong numbers."""

from typing import Any

import torch
import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.nnscaler.digests import digest
from nxdpp.nnscaler.nested_values import values_in


def verify_equal_inputs(inputs: Any) -> None:
    """Compare the tensors, numbers and texts in ``inputs`` with those of the first rank; collective over the group.

    Raises ``RuntimeError`` on all tensor-parallel ranks where one has other inputs.
    """
    group = parallel_state.get_tensor_control_group()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, [_digest(leaf) for leaf in values_in(inputs)], group=group)
    if all(each == digests[0] for each in digests):
        return
    ranks = dist.get_process_group_ranks(group)
    other = next(rank for rank, each in zip(ranks, digests, strict=True) if each != digests[0])
    raise RuntimeError(
        f"ranks {ranks[0]} and {other} are in one unit and got other inputs: give all ranks of a unit the same. "
        f"DistributedSampler takes num_replicas=runtime_ngpus // plan_ngpus and rank=rank // plan_ngpus"
    )


def _digest(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
    return f"{tuple(leaf.shape)} {leaf.dtype} {digest(leaf).hex()}"
