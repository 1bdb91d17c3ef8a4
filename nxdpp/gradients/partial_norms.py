"""Norms of gradients by torch, which would be those of this rank's part of a pipelined model.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` take any iterable, so the gradients tell whose they are.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.optimizer.partial_steps import Parameters
from nxdpp.ground.torch_names import GROUP_GRADIENTS
from nxdpp.ranks import parallel_state

# torch's functions that take a norm, however a program has imported them, run this code.
_NORM = inspect.unwrap(nn.utils.get_total_norm).__code__
_of_models: Parameters = tuple


def refuse_partial_norms(of_models: Parameters) -> None:
    """Make torch's norms of gradients raise ``RuntimeError`` where a rank has only a part of them.

    ``of_models`` returns the present parameters of pipelined models.
    """
    global _of_models
    _of_models = of_models
    if GROUP_GRADIENTS.warn_if_gone():
        return
    group = GROUP_GRADIENTS.found

    def checked_group(tensors: Sequence[Sequence[torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is not None and frame.f_back.f_code is _NORM:
            _check(tensors[0])
        return group(tensors, *args, **kwargs)

    # They call it by its global name.
    GROUP_GRADIENTS.replace(checked_group)


def _check(gradients: Sequence[torch.Tensor]) -> None:
    if not parallel_state.model_parallel_is_initialized():
        return
    ranks = parallel_state.get_pipeline_model_parallel_size() * parallel_state.get_tensor_model_parallel_size()
    if any(map(is_of_experts, _of_models())):
        ranks *= parallel_state.get_expert_model_parallel_size()
    if ranks == 1:
        return
    measured = set(map(id, gradients))
    found = sum(id(each.grad) in measured for each in _of_models() if each.grad is not None)
    if found:
        raise RuntimeError(
            f"torch would take the norm of {counted(found, 'gradient')} of this rank. The model is divided over "
            f"{ranks} ranks, and each would scale its own part by a different factor. Call "
            "model.clip_grad_norm_(max_norm) on every rank; with max_norm=float('inf') it only measures."
        )
