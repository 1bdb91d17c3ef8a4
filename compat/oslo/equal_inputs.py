"""Comparison of the inputs of tensor-parallel ranks: a sampler that divides data over them gives wrong numbers."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from nxdpp import parallel_state


def compare_first_inputs(model: nn.Module) -> None:
    """Make the first call of ``model`` with gradients compare its inputs over the tensor group.

    That call is collective over the group. It raises ``RuntimeError`` on all its ranks for other inputs on one.
    """
    handles: list[RemovableHandle] = []

    def compare(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            _verify((args, dict(kwargs)))
            handles.pop().remove()

    handles.append(model.register_forward_pre_hook(compare, with_kwargs=True))


def _verify(inputs: Any) -> None:
    group = parallel_state.get_tensor_control_group()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, [_digest(leaf) for leaf in pytree.tree_leaves(inputs)], group=group)
    if all(each == digests[0] for each in digests):
        return
    ranks = dist.get_process_group_ranks(group)
    other = next(rank for rank, each in zip(ranks, digests, strict=True) if each != digests[0])
    raise RuntimeError(
        f"ranks {ranks[0]} and {other} share each layer and got other inputs: give all ranks of a tensor group the "
        f"same. DistributedSampler takes num_replicas=model.mpu.get_data_parallel_world_size() and "
        f"rank=model.mpu.get_data_parallel_rank()"
    )


def _digest(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
    raw = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{tuple(leaf.shape)} {leaf.dtype} {hashlib.blake2b(raw, digest_size=16).hexdigest()}"
