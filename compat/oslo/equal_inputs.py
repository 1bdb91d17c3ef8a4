"""Comparison of inputs over the ranks of a replica: a sampler that divides data over them gives wrong numbers."""

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
    """Make the first call of ``model`` with gradients compare its inputs over the ranks of its replica.

    That call is collective over these ranks. It raises ``RuntimeError`` on all of them for other inputs on one.
    """
    handles: list[RemovableHandle] = []

    def compare(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        # A copy of the model has the hook too.
        if torch.is_grad_enabled() and handles:
            verify_equal((args, dict(kwargs)), "give all ranks of a replica the same.")
            handles.pop().remove()

    handles.append(model.register_forward_pre_hook(compare, with_kwargs=True))


def verify_equal(inputs: Any, remedy: str) -> None:
    """Compare ``inputs`` over the tensor group and the pipeline of this rank; collective over both.

    Raises ``RuntimeError`` on all these ranks for other inputs on one.
    """
    own = dist.get_rank(), [_digest(leaf) for leaf in pytree.tree_leaves(inputs)]
    of_stage = _gathered(own, parallel_state.get_tensor_control_group())
    of_replica = _gathered(of_stage, parallel_state.get_pipeline_control_group())
    (first, expected), *others = [each for stage in of_replica for each in stage]
    other = next((rank for rank, found in others if found != expected), None)
    if other is not None:
        raise RuntimeError(
            f"ranks {first} and {other} share one replica of the model and got other inputs: {remedy} "
            f"DistributedSampler takes num_replicas=model.mpu.get_data_parallel_world_size() and "
            f"rank=model.mpu.get_data_parallel_rank()"
        )


def _gathered(own: Any, group: dist.ProcessGroup) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    return everyones


def _digest(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
    raw = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{tuple(leaf.shape)} {leaf.dtype} {hashlib.blake2b(raw, digest_size=16).hexdigest()}"
