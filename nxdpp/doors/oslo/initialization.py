"""``initialize``: OSLO's way to make a model parallel in place.

::

    config ─ checked ─▶ MPU ─▶ layers divided ─▶ moved to the device ─▶ ParallelModel, the same object
"""

import functools
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from nxdpp.doors.oslo.config import check_not_given, tensor_parallel_size_of
from nxdpp.doors.oslo.equal_ranks import check_same, compare_first_inputs, digests
from nxdpp.doors.oslo.mpu import MPU
from nxdpp.doors.oslo.parallel_model import is_parallel, make_parallel
from nxdpp.gradients.followed_optimizers import followed_by_optimizers
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.waits import Wait
from nxdpp.tensor.models.parallelize import tensor_parallelize
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.tensor_copies import compare_tensor_copies

M = TypeVar("M", bound=PreTrainedModel)


def initialize(model: M, config: Mapping[str, Any] | str | os.PathLike[str], *, num_microbatches: int = 1) -> M:
    """Divide ``model`` over ranks as ``config`` says, in place; collective over all ranks.

    The model stays a ``PreTrainedModel`` of its class and keeps its ``config``. It is moved to this rank's device, and
    has also ``mpu``, ``save_parallelized`` and ``from_parallelized`` (``ParallelModel``). Optimizers that were made
    before hold this rank's parameters afterwards. Each group stays in its place, for learning-rate schedulers.

    Args:
        model: of transformers, with the same weights on all ranks.
        config: a dict or the path of a JSON file, with the section ``"model_parallelism"``. docs/oslo.md lists the
            keys.
        num_microbatches: refused but for 1: a pipeline is ``nxdpp.NxDPPModel``.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: for a model that is not a ``PreTrainedModel``, and for values of the wrong type in ``config``.
        ValueError: for a ``config`` that nxdpp cannot honour, and for sizes that the model or the world does not divide
            by, and for an optimizer that has stepped.
        RuntimeError: for a model that was given to ``initialize`` before, and after model parallelism was initialized
            with different sizes.
    """
    size = tensor_parallel_size_of(config)
    check_not_given("num_microbatches", num_microbatches, num_microbatches != 1)
    _check_model(model)
    mpu = MPU(size)
    before = digests(model)
    with followed_by_optimizers(model):
        if size > 1:
            tensor_parallelize(model, gather_logits=True)
        move_model_to_device(model, parallel_state.local_device())
        _sum_partial_gradients(model, mpu.get_tensor_parallel_group())
    make_parallel(model, mpu)
    if size > 1:
        check_same(model, before)
        compare_tensor_copies(model)
        compare_first_inputs(model)
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"initialize takes a PreTrainedModel of transformers, not a {type(model).__name__}. Give it the model "
            f"itself, before DistributedDataParallel and other wrappers."
        )
    if is_parallel(model):
        raise RuntimeError("the model was given to initialize before: call it once for each model")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("the model has tensors without values, on the meta device: build it on the CPU")


def _sum_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the marked parameters of ``model`` over ``group`` as they arise, in each backward.

    Each tensor-parallel rank computes a part of the gradient of such a whole parameter: norms of the heads of one rank
    have them (Qwen3). They are summed before ``DistributedDataParallel`` averages.
    """
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel_enabled", False):
            is_trained = parameter.requires_grad
            # A frozen parameter takes no hook, and may be trained later.
            parameter.requires_grad_(True)
            parameter.register_hook(functools.partial(_summed, group))
            parameter.requires_grad_(is_trained)


def _summed(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.detach().clone(memory_format=torch.contiguous_format)
    with Wait("gradient of a whole parameter", group):
        dist.all_reduce(total, group=group)
    return total
