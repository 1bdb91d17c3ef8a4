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

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import functional

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.embedding import ParallelEmbedding
from nxdpp.tensor.initial_parts import InitMethod, refuse_master_weight
from nxdpp.tensor.overlapped_linear import WeightRows, autocast_dtype, is_trained, overlapped_linear
from nxdpp.tensor.padding import ranges
from nxdpp.tensor.parallel_layer import ParallelLinear

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]


class ColumnParallelLinear(ParallelLinear):
    """``torch.nn.Linear`` whose outputs are divided over the tensor-parallel ranks.

    The all-reduce of the input-gradient runs while the weight-gradient is computed.

    Args:
        input_size: size ``I`` of an input.
        output_size: size ``O`` of an output, a multiple of the tensor-parallel size.
        bias: add a bias: the whole on each rank with ``gather_output``, else this rank's part.
        gather_output: return the whole output on each rank, else this rank's part.
        sequence_parallel_enabled: gather the sequence first; each rank gives its part.
        dtype: of the parameters.
        device: of the parameters, by default the context's device.
        stride: number of blocks of outputs, each of which is divided, such as 3 for a fused query, key and value.
        init_method: initialises the whole weight ``(O, I)`` in place; by default as in ``torch.nn.Linear``.
        sequence_dimension: the dimension of the sequence.
        keep_master_weight: only ``False``: no layer keeps the whole weight.
        skip_bias_add: return the output without the bias, and the bias.
        pad: pad an ``output_size`` that does not divide. Outputs behind it are zero, and no part of a gathered output.
            Without ``gather_output`` the last ranks return them: ``parallel_cross_entropy`` leaves them out with
            ``vocabulary_size``.
        tensor_model_parallel_group: this rank's tensor group.
        reduce_dtype: in which the input-gradients of the ranks are summed, by default their own dtype. NeuronX
            Distributed's default is float32. The sum in a different dtype does not overlap with the weight-gradient.

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
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_master_weight(keep_master_weight)
        options = init_method, sequence_parallel_enabled, sequence_dimension, skip_bias_add, pad
        super().__init__(input_size, output_size, 0, stride, *options, tensor_model_parallel_group, reduce_dtype)
        self.gather_output = gather_output
        # A whole bias is added to the gathered output, a divided one to the product.
        self._bias_follows = skip_bias_add or (gather_output and self.tensor_parallel_size > 1)
        padded = self._padded_at_first
        self._add_part("weight", (output_size, input_size), 0, dtype, device, stride=stride, padded=padded)
        if not bias:
            self.register_parameter("bias", None)
        elif gather_output:
            self._add_whole_bias(output_size, dtype, device)
        else:
            self._add_part("bias", (output_size,), 0, dtype, device, stride=stride, padded=padded)
        self.reset_parameters()

    def forward(self, input_: torch.Tensor) -> Any:
        """Return the product ``(..., O)`` or this rank's part of it; with ``skip_bias_add`` a pair with the bias."""
        self._check_group()
        output = self._product(input_)
        if self.gather_output and self.tensor_parallel_size > 1:
            output = mappings.gather_from_tensor_model_parallel_region(output)
            if self.stride > 1 or self.padded_size > self.output_size:
                output = self._in_order(output)
        return self._biased(output) if self._bias_follows else output

    def _product(self, input_: torch.Tensor) -> torch.Tensor:
        """This rank's part ``(..., O / ranks)`` of the product, with the bias unless it follows."""
        sequence_dimension = self.sequence_dimension if self.sequence_parallel_enabled else None
        rows = WeightRows(self.weight, None if self._bias_follows else self.bias)
        (output,) = column_parallel(input_, [rows], sequence_dimension, self.reduce_dtype)
        return output

    def _in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """Order the outputs by block and rank, without padding; they come by rank and block."""
        by_rank = gathered.unflatten(-1, (self.tensor_parallel_size, self.stride, -1))
        by_block = by_rank.transpose(-3, -2).flatten(-2)
        ordered: torch.Tensor = by_block[..., : self.output_size // self.stride].flatten(-2)
        return ordered


class RowParallelLinear(ParallelLinear):
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
        keep_master_weight, skip_bias_add, tensor_model_parallel_group: as in ``ColumnParallelLinear``.
        pad: pad an ``input_size`` that does not divide. Inputs behind it do not matter.
        reduce_dtype: in which the products of the ranks are summed, by default their own dtype. NeuronX Distributed's
            default is float32.

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
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_master_weight(keep_master_weight)
        options = init_method, sequence_parallel_enabled, sequence_dimension, skip_bias_add, pad
        super().__init__(input_size, output_size, 1, stride, *options, tensor_model_parallel_group, reduce_dtype)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear with sequence_parallel_enabled=True needs input_is_parallel=True: its input is the "
                "whole sequence, divided along the last dimension, as a ColumnParallelLinear returns it"
            )
        self.input_is_parallel = input_is_parallel
        padded = self._padded_at_first
        self._add_part("weight", (output_size, input_size), 1, dtype, device, stride=stride, padded=padded)
        if bias:
            # Each rank adds it to its part of the sequence.
            whole = self._add_whole_bias(output_size, dtype, device)
            whole.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]  # nxdpp's own attribute of a tensor
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, input_: torch.Tensor) -> Any:
        """Return the product ``(..., O)``, under sequence parallelism this rank's part of the sequence.

        With ``skip_bias_add`` it is a pair with the bias.
        """
        self._check_group()
        if self.tensor_parallel_size == 1 and not self.skip_bias_add:
            return functional.linear(input_, self.weight, self.bias)
        input_ = self._without_padding(input_) if self.input_is_parallel else self._own_part(input_)
        product = functional.linear(input_, self.weight)
        if self.sequence_parallel_enabled:
            total = mappings.reduce_scatter_to_sequence_parallel_region(
                product, self.sequence_dimension, reduce_dtype=self.reduce_dtype
            )
        else:
            total = mappings.reduce_from_tensor_model_parallel_region(product, reduce_dtype=self.reduce_dtype)
        return self._biased(total)

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
    input_: torch.Tensor,
    parts: list[WeightRows],
    sequence_dimension: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return ``input_ @ weight.T + bias`` for this rank's rows of each weight; the input's gradient sums all ranks.

    With a ``sequence_dimension`` the input is this rank's part of the sequence. ``reduce_dtype`` is the dtype of the
    gradient's sum, by default its own.
    """
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return [functional.linear(input_, *part) for part in parts]
    has_nodes = sequence_dimension is not None or not torch.compiler.is_dynamo_compiling()
    if has_nodes and is_trained(input_, parts):
        return overlapped_linear(input_, parts, sequence_dimension, reduce_dtype)
    whole = whole_input(input_, parts, sequence_dimension, reduce_dtype)
    return [functional.linear(whole, *part) for part in parts]


def whole_input(
    x: torch.Tensor,
    parts: list[WeightRows],
    sequence_dimension: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the input of the products of ``parts``, whose gradient is summed over them and over the tensor group.

    In compiled code it has the dtype of ``SharedInput``, for which it stands there. Arguments are as of
    ``column_parallel``.
    """
    dtype = autocast_dtype(x)
    if dtype is not None and is_trained(x, parts):
        x = x.to(dtype)
    if sequence_dimension is not None:
        return mappings.gather_from_sequence_parallel_region(x, sequence_dimension, reduce_dtype=reduce_dtype)
    return mappings.copy_to_tensor_model_parallel_region(x, reduce_dtype=reduce_dtype)
