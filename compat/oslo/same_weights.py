"""Tensor-parallel ranks whose models have other weights: each would hold a part of another whole.

A model with random weights is allowed, for ``from_parallelized`` may replace them. Its calls raise until then.
"""

import hashlib
import warnings
from typing import Any

import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.oslo.mpu import MPU

_SAMPLES = 16


def digests(model: nn.Module) -> tuple[str, str]:
    """Return hashes of samples of the weights of ``model``, and of torch's random state; not collective."""
    weights = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        samples = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().contiguous()
        weights.update(f"{name} {tuple(tensor.shape)}".encode())
        weights.update(samples.view(torch.uint8).numpy().tobytes())
    return weights.hexdigest(), hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()


def check_same(model: nn.Module, mpu: MPU, own: tuple[str, str]) -> None:
    """Compare ``own``, the ``digests`` before the model was divided, over the tensor group; collective over all ranks.

    With other weights the calls of ``model`` raise ``RuntimeError`` until ``allow`` is called. With another random
    state a model with dropout gives a warning.
    """
    place = mpu.get_data_parallel_rank(), mpu.get_pipeline_parallel_rank()
    everyones = parallel_state.get_exchange().gather((place, own))
    mates = [digest for where, digest in everyones if where == place]
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
