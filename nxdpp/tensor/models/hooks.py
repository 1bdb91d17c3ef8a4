"""Collectives around modules that stay whole, or of which only parameters are divided."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from nxdpp.ground.torch_names import PARAMETERS
from nxdpp.ground.transformers_names import GAUSSIAN_TOPK
from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.models.modules import override
from nxdpp.tensor.tensor_attributes import mark_sequence_parallel


class WholeGaussianTopk(nn.Module):
    """Activation that keeps features above a mean and deviation of all features, on all ranks."""

    def _gaussian_topk(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's features ``(B, T, I / ranks)`` of the activation of ``inputs`` on all ranks."""
        own = inputs.shape[-1]
        # The gradient of a rank's features goes to the features of all ranks, by the mean and the deviation.
        whole = mappings.gather_from_sequence_parallel_region(inputs, sequence_dimension=-1)
        kept: torch.Tensor = GAUSSIAN_TOPK.of(super())(whole)
        return kept.narrow(-1, parallel_state.get_tensor_model_parallel_rank() * own, own)


class DividedRows(nn.Module):
    """Linear layer with whole parameters. Each rank computes some of the rows; the gradients are the ones of all."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product ``(..., O)`` of the whole ``input`` ``(..., I)``."""
        weight = mappings.copy_to_tensor_model_parallel_region(self.weight)
        bias = None if self.bias is None else mappings.copy_to_tensor_model_parallel_region(self.bias)
        rows = input.reshape(-1, input.shape[-1])
        missing = -len(rows) % parallel_state.get_tensor_model_parallel_size()
        own = mappings.scatter_to_tensor_model_parallel_region_with_dim(functional.pad(rows, (0, 0, 0, missing)), 0)
        product = functional.linear(own, weight.t() if isinstance(self, Conv1D) else weight, bias)
        whole = mappings.gather_from_tensor_model_parallel_region_with_dim(product, 0)
        return whole[: len(rows)].reshape(*input.shape[:-1], whole.shape[-1])


def install(module: nn.Module, style: str, rope_size: int | None) -> None:
    """Give ``module`` the collectives of ``style``."""
    if style == "replicated_with_grad_allreduce":
        # Its parameters see this rank's heads only. A pipeline adds the gradients up once a step.
        mark_sequence_parallel(module)
    elif style == "mla_kv_a_proj":
        assert rope_size is not None
        module.register_forward_hook(partial(_copy_rope, rope_size))
    elif style in ("all_reduce", "moe_tp_experts"):
        # Its linear layers, which copy inputs, do not count.
        has_parts = any(getattr(each, "tensor_model_parallel", False) for each in PARAMETERS.of(module).values())
        if style == "moe_tp_experts" or has_parts:
            module.register_forward_pre_hook(_copy_expert_inputs, with_kwargs=True)
        module.register_forward_hook(_sum_output)
    elif style == "rows":
        override(module, DividedRows)
    elif style == "gaussian_topk":
        if not GAUSSIAN_TOPK.held_by(module):
            raise GAUSSIAN_TOPK.gone()
        override(module, WholeGaussianTopk)
    elif style == "moe_identity_expert":
        module.register_forward_pre_hook(_divide_input)


def _copy_rope(size: int, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """The rotated part of the keys goes into attention directly, on each rank for its own heads."""
    whole, rope = output.split([output.shape[-1] - size, size], dim=-1)
    return torch.cat([whole, mappings.copy_to_tensor_model_parallel_region(rope)], dim=-1)


def _sum_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return mappings.reduce_from_tensor_model_parallel_region(output)


def _copy_expert_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Each rank has a part of each expert: the gradients of tokens and of routing weights are sums."""
    return tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}


def _copied(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return mappings.copy_to_tensor_model_parallel_region(value) if floating else value


def _divide_input(module: nn.Module, args: Any) -> Any:
    """Experts that return their input are on all ranks, and the experts' outputs are summed."""
    return args[0] / parallel_state.get_tensor_model_parallel_size(), *args[1:]
