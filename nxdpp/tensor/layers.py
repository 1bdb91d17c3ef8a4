"""Linear layers divided over the tensor-parallel ranks, with the names of NeuronX Distributed.

A pair of linear layers needs one all-reduce in the forward and one in the backward, as in "Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism" (Shoeybi et al., 2019)::

    x (S, B, H)      ColumnParallelLinear            RowParallelLinear
    rank 0   x ───▶  rows 0..n of the weight  ─ y0 ▶ columns 0..n  ─┐
    rank 1   x ───▶  rows n..  of the weight  ─ y1 ▶ columns n..   ─┴▶ all-reduce ─▶ (S, B, O) on both

With ``sequence_parallel_enabled`` each rank has a part of the sequence outside of the pair (Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022): the first layer gathers it, the second one
reduce-scatters. ``sequence_dimension`` is 0 by default, ``(S, B, H)``; 1 is for ``(B, S, H)``.

The initial values are the same as in a whole ``torch.nn.Linear``, whatever the tensor-parallel size, and so is the
state of the generator afterwards. They are drawn on the CPU. The embedding, whose name belongs here in NeuronX
Distributed, is in ``embedding.py``.
"""

import math
from fractions import Fraction

import torch
from torch import nn
from torch.nn import functional, init

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.embedding import ParallelEmbedding
from nxdpp.tensor.initial_parts import InitMethod, fill_parameter
from nxdpp.tensor.overlapped_linear import WeightRows, overlapped_linear
from nxdpp.tensor.padding import ranges
from nxdpp.tensor.parallel_layer import ParallelLayer, given_device
from nxdpp.tensor.tensor_attributes import is_tensor_parallel, set_tensor_model_parallel_attributes

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]


class _ParallelLinear(ParallelLayer):
    """Weight ``(output_size, input_size)`` divided along ``dim``, and a bias."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        dim: int,
        stride: int,
        init_method: InitMethod | None,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        pad: bool,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
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

    def extra_repr(self) -> str:
        """Sizes, in the form of ``torch.nn.Linear``."""
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, "
            f"tensor_parallel_size={self.tensor_parallel_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """``torch.nn.Linear`` whose outputs are divided over the tensor-parallel ranks.

    The all-reduce of the input-gradient runs while the weight-gradient is computed.

    Args:
        input_size: size ``I`` of an input.
        output_size: size ``O`` of an output, a multiple of the tensor-parallel size.
        bias: add a bias, which is divided too.
        gather_output: return the whole output on each rank, else this rank's part.
        sequence_parallel_enabled: gather the sequence first; each rank gives its part.
        dtype: of the parameters.
        device: of the parameters, by default the context's device.
        stride: number of blocks of outputs, each of which is divided, such as 3 for a fused query, key and value.
        init_method: initialises the whole weight ``(O, I)`` in place; by default as in ``torch.nn.Linear``.
        sequence_dimension: the dimension of the sequence.
        pad: pad an ``output_size`` that does not divide. Outputs behind it are zero, and no part of a gathered output.
            Without ``gather_output`` the last ranks return them: ``parallel_cross_entropy`` leaves them out with
            ``vocabulary_size``.

    Shape: ``(..., I)`` -> ``(..., O)`` with ``gather_output``, else ``(..., O / ranks)``; two dimensions or more under
    sequence parallelism.

    Raises:
        ValueError: for an ``output_size`` that does not divide, without ``pad``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        *,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_dimension: int | None = None,
        pad: bool = False,
    ) -> None:
        super().__init__(
            input_size, output_size, 0, stride, init_method, sequence_parallel_enabled, sequence_dimension, pad
        )
        self.gather_output = gather_output
        padded = self._padded_at_first
        self._add_part("weight", (output_size, input_size), 0, dtype, device, stride=stride, padded=padded)
        if bias:
            self._add_part("bias", (output_size,), 0, dtype, device, stride=stride, padded=padded)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the product ``(..., O)`` or this rank's part of it."""
        self._check_group()
        output = self._product(input_)
        if not self.gather_output or self.tensor_parallel_size == 1:
            return output
        gathered = mappings.gather_from_tensor_model_parallel_region(output)
        is_whole = self.stride == 1 and self.padded_size == self.output_size
        return gathered if is_whole else self._in_order(gathered)

    @property
    def output_size_per_partition(self) -> int:
        """Number of outputs of this rank, with padding."""
        return self.padded_size // self.tensor_parallel_size

    def _product(self, input_: torch.Tensor) -> torch.Tensor:
        """This rank's part ``(..., O / ranks)`` of the product."""
        sequence_dimension = self.sequence_dimension if self.sequence_parallel_enabled else None
        (output,) = column_parallel(input_, [WeightRows(self.weight, self.bias)], sequence_dimension)
        return output

    def _in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """Order the outputs by block and rank, without padding; they come by rank and block."""
        by_rank = gathered.unflatten(-1, (self.tensor_parallel_size, self.stride, -1))
        by_block = by_rank.transpose(-3, -2).flatten(-2)
        ordered: torch.Tensor = by_block[..., : self.output_size // self.stride].flatten(-2)
        return ordered


class RowParallelLinear(_ParallelLinear):
    """``torch.nn.Linear`` whose inputs are divided over the tensor-parallel ranks.

    Args:
        input_size: size ``I`` of an input, a multiple of the tensor-parallel size.
        output_size: size ``O`` of an output.
        bias: add a bias, of which each rank has a copy.
        input_is_parallel: each rank gives its part of the input, as a column-parallel layer returns it.
        sequence_parallel_enabled: return this rank's part of the sequence.
        dtype: of the parameters.
        device: of the parameters, by default the context's device.
        stride: number of blocks of inputs, each of which is divided.
        init_method: initialises the whole weight ``(O, I)`` in place; by default as in ``torch.nn.Linear``.
        sequence_dimension: the dimension of the sequence.
        pad: pad an ``input_size`` that does not divide. Inputs behind it do not matter.

    Shape: ``(..., I / ranks)`` with ``input_is_parallel``, else ``(..., I)`` -> ``(..., O)``.

    Raises:
        ValueError: for an ``input_size`` that does not divide, without ``pad``, and for sequence parallelism without
            ``input_is_parallel``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        *,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_dimension: int | None = None,
        pad: bool = False,
    ) -> None:
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear with sequence_parallel_enabled=True needs input_is_parallel=True: its input is the "
                "whole sequence, divided along the last dimension, as a ColumnParallelLinear returns it"
            )
        super().__init__(
            input_size, output_size, 1, stride, init_method, sequence_parallel_enabled, sequence_dimension, pad
        )
        self.input_is_parallel = input_is_parallel
        padded = self._padded_at_first
        self._add_part("weight", (output_size, input_size), 1, dtype, device, stride=stride, padded=padded)
        if bias:
            parameter = nn.Parameter(torch.empty(output_size, dtype=dtype, device=given_device(device)))
            set_tensor_model_parallel_attributes(parameter, False, -1)
            # Each rank adds it to its part of the sequence.
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]  # an attribute of ours on a tensor
            self.bias = parameter
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the product ``(..., O)``, under sequence parallelism this rank's part of the sequence."""
        self._check_group()
        if self.tensor_parallel_size == 1:
            return functional.linear(input_, self.weight, self.bias)
        input_ = self._without_padding(input_) if self.input_is_parallel else self._own_part(input_)
        product = functional.linear(input_, self.weight)
        if self.sequence_parallel_enabled:
            total = mappings.reduce_scatter_to_sequence_parallel_region(product, self.sequence_dimension)
        else:
            total = mappings.reduce_from_tensor_model_parallel_region(product)
        # Under autocast the sum has its dtype, and the bias may have a different one.
        return total if self.bias is None else total + self.bias.to(total.dtype)

    @property
    def input_size_per_partition(self) -> int:
        """Number of inputs of this rank, with padding."""
        return self.padded_size // self.tensor_parallel_size

    def _own_part(self, input_: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole input, of each block, with zeros for padding."""
        missing = (self.padded_size - self.input_size) // self.stride
        if self.stride > 1 or missing:
            blocks = functional.pad(input_.unflatten(-1, (self.stride, -1)), (0, missing))
            input_ = blocks.unflatten(-1, (self.tensor_parallel_size, -1)).transpose(-3, -2).flatten(-3)
        return mappings.scatter_to_tensor_model_parallel_region(input_)

    def _without_padding(self, input_: torch.Tensor) -> torch.Tensor:
        """The input with zeros in the place of padding, whose values and gradients then do not matter."""
        if self.padded_size == self.input_size:
            return input_
        chunk = self.input_size_per_partition // self.stride
        count = ranges(self.input_size, self.input_size_per_partition, self.stride, self.tensor_parallel_rank)[0].length
        if count == chunk:
            return input_
        return functional.pad(input_.unflatten(-1, (self.stride, chunk))[..., :count], (0, chunk - count)).flatten(-2)


def column_parallel(
    input_: torch.Tensor, parts: list[WeightRows], sequence_dimension: int | None = None
) -> list[torch.Tensor]:
    """Return ``input_ @ weight.T + bias`` for this rank's rows of each weight; the input's gradient sums all ranks.

    With a ``sequence_dimension`` the input is this rank's part of the sequence.
    """
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return [functional.linear(input_, *part) for part in parts]
    if torch.is_grad_enabled() and input_.requires_grad and any(part.weight.requires_grad for part in parts):
        return overlapped_linear(input_, parts, sequence_dimension=sequence_dimension)
    if sequence_dimension is not None:
        input_ = mappings.gather_from_sequence_parallel_region(input_, sequence_dimension)
    else:
        input_ = mappings.copy_to_tensor_model_parallel_region(input_)
    return [functional.linear(input_, *part) for part in parts]


def init_as_torch(weight: torch.Tensor) -> None:
    """Initialise a whole weight as ``torch.nn.Linear`` does."""
    init.kaiming_uniform_(weight, a=math.sqrt(5))
