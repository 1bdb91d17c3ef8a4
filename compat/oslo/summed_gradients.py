"""Gradients of whole parameters of which each tensor-parallel rank computes a part, summed as they arise.

Norms of the heads of one rank have such parameters (Qwen3). A pipeline sums them in its steps; a model under
``DistributedDataParallel`` sums them before it averages.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn


def sum_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the marked parameters of ``model`` over ``group``, in each backward."""
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel_enabled", False):
            is_trained = parameter.requires_grad
            # A frozen parameter takes no hook, and may be trained later.
            parameter.requires_grad_(True)
            parameter.register_hook(functools.partial(_summed, group))
            parameter.requires_grad_(is_trained)


def _summed(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
