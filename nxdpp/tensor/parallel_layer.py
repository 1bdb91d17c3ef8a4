"""Bases of the layers whose parameters are divided over the tensor-parallel ranks, and of the linear ones."""

import math
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import init

from nxdpp.ranks import parallel_state
from nxdpp.tensor.initial_parts import InitMethod, fill_parameter
from nxdpp.tensor.tensor_attributes import KeepsAttributes, is_tensor_parallel, set_tensor_model_parallel_attributes


class ParallelLayer(KeepsAttributes):
    """A layer of which this rank has a part of each parameter.

    Raises ``RuntimeError`` before ``initialize_model_parallel``, and ``ValueError`` for a
    ``tensor_model_parallel_group`` that is not this rank's.
    """

    # Attributes that a print of the model has.
    _shown: tuple[str, ...] = ()

    def __init__(self, tensor_model_parallel_group: ProcessGroup | None = None) -> None:
        super().__init__()
        if tensor_model_parallel_group is not None:
            _check_ranks(type(self).__name__, tensor_model_parallel_group)
        self.tensor_parallel_size = parallel_state.get_tensor_model_parallel_size()
        self.tensor_parallel_rank = parallel_state.get_tensor_model_parallel_rank()

    def extra_repr(self) -> str:
        """Sizes, in the form of torch's layers."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in (*self._shown, "tensor_parallel_size"))

    def _add_part(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        dtype: torch.dtype,
        device: Any,
        *,
        stride: int = 1,
        padded: int | None = None,
        copies: int = 1,
    ) -> None:
        """Register the unwritten parameter ``name``, this rank's part of a whole of ``shape``.

        The whole, padded to ``padded`` elements, is divided along ``dim``. ``copies`` ranks have each part.
        """
        parts = self.tensor_parallel_size // copies
        own = list(shape)
        own[dim] = (padded or shape[dim]) // parts
        parameter = nn.Parameter(torch.empty(own, dtype=dtype, device=given_device(device)))
        set_tensor_model_parallel_attributes(parameter, True, dim, stride, parts)
        parameter.whole_size = shape[dim]  # type: ignore[attr-defined]  # nxdpp's own attribute of a tensor
        self.register_parameter(name, parameter)

    def _check_group(self) -> None:
        size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
        if (size, rank) != (self.tensor_parallel_size, self.tensor_parallel_rank):
            raise RuntimeError(
                f"a {type(self).__name__} was built on tensor-parallel rank {self.tensor_parallel_rank} of "
                f"{self.tensor_parallel_size}, and runs on rank {rank} of {size}: build the model after "
                f"initialize_model_parallel"
            )


class ParallelLinear(ParallelLayer):
    """Weight ``(output_size, input_size)`` divided along ``dim``, and a bias."""

    _shown = ("input_size", "output_size")

    def __init__(
        self,
        input_size: int,
        output_size: int,
        dim: int,
        stride: int,
        init_method: InitMethod | None,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        skip_bias_add: bool,
        pad: bool,
        tensor_model_parallel_group: ProcessGroup | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(tensor_model_parallel_group)
        if isinstance(sequence_parallel_enabled, torch.dtype):
            raise TypeError(
                f"the fifth argument of {type(self).__name__} is sequence_parallel_enabled, as in the API guide: give "
                f"dtype={sequence_parallel_enabled} and what follows it by name"
            )
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.skip_bias_add, self.reduce_dtype = skip_bias_add, reduce_dtype
        self._init_method = init_method
        self._dim = dim
        divided, name = ((output_size, "output_size"), (input_size, "input_size"))[dim]
        parts = self.tensor_parallel_size * stride
        if stride < 1 or divided % (stride if pad else parts):
            blocks = "" if stride == 1 else f" times stride={stride}"
            raise ValueError(
                f"{type(self).__name__} divides {name}={divided}, which is no multiple of the tensor-parallel size "
                f"{self.tensor_parallel_size}{blocks}: give a multiple of {parts}, or pad=True"
            )
        self._padded_at_first = math.ceil(divided / parts) * parts
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None

    @property
    def padded_size(self) -> int:
        """Divided size of the weight, with padding."""
        return self.weight.shape[self._dim] * self.tensor_parallel_size

    def reset_parameters(self) -> None:
        """Initialise weight and bias."""
        self.init_weight_cpu()
        if self.bias is not None:
            bound = 1 / math.sqrt(self.input_size) if self.input_size > 0 else 0
            fill_parameter(self.bias, lambda whole: init.uniform_(whole, -bound, bound))

    def init_weight_cpu(self) -> None:
        """Initialise the weight from numbers that are drawn on the CPU."""
        fill_parameter(self.weight, self._init_method or init_as_torch)

    def padded_sizes(self, ratio: Fraction) -> dict[str, Fraction]:
        """For ``ratio`` times as many heads, the size of each divided parameter with padding."""
        divided = ("weight", "bias") if self.bias is not None and is_tensor_parallel(self.bias) else ("weight",)
        return {name: vars(self.get_parameter(name))["whole_size"] * ratio for name in divided}

    def _add_whole_bias(self, size: int, dtype: torch.dtype, device: torch.device | str | int | None) -> nn.Parameter:
        """Register a bias of which each rank has a copy, unwritten."""
        bias = nn.Parameter(torch.empty(size, dtype=dtype, device=given_device(device)))
        set_tensor_model_parallel_attributes(bias, False, -1)
        self.bias = bias
        return bias

    def _biased(self, product: torch.Tensor) -> Any:
        """The product and the bias: added up, or both with ``skip_bias_add``."""
        if self.skip_bias_add:
            return product, self.bias
        # Under autocast the product has its dtype, and the bias may have a different one.
        return product if self.bias is None else product + self.bias.to(product.dtype)


def init_as_torch(weight: torch.Tensor) -> None:
    """Initialise a whole weight as ``torch.nn.Linear`` does."""
    init.kaiming_uniform_(weight, a=math.sqrt(5))


def _check_ranks(layer: str, group: ProcessGroup) -> None:
    own = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    given = dist.get_process_group_ranks(group)
    if given != own:
        raise ValueError(
            f"tensor_model_parallel_group has the ranks {given}, and a {layer} is divided over the tensor group of "
            f"this rank, {own}: leave it out, or give initialize_model_parallel the size {len(given)}"
        )


def given_device(device: torch.device | str | int | None) -> torch.device | str | int | None:
    """Return ``device``, and ``None`` for ``False``, the default that NxD's guide prints for a row-parallel layer."""
    return None if device is False else device
