"""Comparisons of ranks that share one replica of a model: their inputs, and their weights before it is divided.

A sampler that divides data over them gives wrong numbers. Tensor-parallel ranks with different weights would each hold
a part of a different whole. A model with random weights is allowed: ``from_parallelized`` may replace them, and its
calls raise until then.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nxdpp.agreement.comparison import verify_same_inputs
from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.same_values import sample
from nxdpp.ground.torch_names import pytree
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import gather_values

_SAMPLES = 16
_SAMPLER = (
    "DistributedSampler takes num_replicas=model.mpu.get_data_parallel_world_size() and "
    "rank=model.mpu.get_data_parallel_rank()"
)


def compare_first_inputs(model: nn.Module) -> None:
    """Make the first call of ``model`` with gradients compare its inputs over the tensor group.

    That call is collective over the group. It raises ``RuntimeError`` on all of them for different inputs on one.
    """
    handles: list[RemovableHandle] = []

    def compare(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        # A copy of the model has the hook too.
        if torch.is_grad_enabled() and handles:
            verify_equal((args, dict(kwargs)), "give all ranks of a replica the same.")
            handles.pop().remove()

    handles.append(model.register_forward_pre_hook(compare, with_kwargs=True))


def verify_equal(inputs: Any, remedy: str) -> None:
    """Compare ``inputs`` over the tensor group; collective over it.

    Raises ``RuntimeError`` on all its ranks for different inputs on one.
    """
    verify_same_inputs(pytree.tree_leaves(inputs), "share one replica of the model", f"{remedy} {_SAMPLER}")


def digests(model: nn.Module) -> tuple[bytes, bytes]:
    """Return hashes of samples of the weights of ``model``, and of torch's random state; not collective."""
    weights = {
        name: (tuple(tensor.shape), sample(tensor, _SAMPLES))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.is_meta and tensor.numel()
    }
    return digest(repr(weights).encode()), digest(torch.get_rng_state().numpy().data)


def check_same(model: nn.Module, own: tuple[bytes, bytes]) -> None:
    """Compare ``own``, the ``digests`` before the model was divided; collective over the tensor group.

    With different weights the calls of ``model`` raise ``RuntimeError`` until ``allow`` is called. With a different
    random state a model with dropout gives a warning.
    """
    mates = gather_values(own, parallel_state.get_tensor_control_group())
    if len({weights for weights, _ in mates}) > 1:
        vars(model)["refused_calls"] = model.register_forward_pre_hook(_refuse)
    elif len({state for _, state in mates}) > 1 and _drops(model):
        warnings.warn(
            "torch's random states differ between the tensor-parallel ranks, whose dropout is of the same activations: "
            "call torch.manual_seed with one number on all ranks of a tensor group before training",
            stacklevel=3,
        )


def allow(model: nn.Module) -> None:
    """Let calls of ``model`` run: its weights were loaded."""
    handle = vars(model).pop("refused_calls", None)
    if handle is not None:
        handle.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        "the weights differed between tensor-parallel ranks, so each rank holds a part of another whole. Call "
        "torch.manual_seed with one number on all ranks before the model is made, or from_parallelized(directory)."
    )


def _drops(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
