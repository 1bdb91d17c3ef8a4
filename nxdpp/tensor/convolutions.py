"""Convolutions that are divided over the tensor-parallel ranks by channels, with the names of NeuronX Distributed.

As a pair, the first divides its outputs and the second its inputs; see ``layers`` for linear layers. The initial
values are the same as in a whole ``torch.nn.Conv2d``, whatever the tensor-parallel size.
"""

import math

import torch
from torch import nn
from torch.nn import functional, init

from nxdpp.tensor import mappings
from nxdpp.tensor.initial_parts import InitMethod, fill_parameter
from nxdpp.tensor.parallel_layer import ParallelLayer, given_device
from nxdpp.tensor.parallel_linear import init_as_torch
from nxdpp.tensor.tensor_attributes import set_tensor_model_parallel_attributes

_Sizes = int | tuple[int, int]
_CHANNELS = 1


class _ParallelConv2d(ParallelLayer):
    """Weight ``(out_channels, in_channels, kernel height, kernel width)`` divided along ``dim``, and a bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        dim: int,
        kernel_size: _Sizes,
        stride: _Sizes,
        padding: _Sizes,
        dilation: _Sizes,
        groups: int,
        padding_mode: str,
    ) -> None:
        super().__init__()
        if groups != 1 or padding_mode != "zeros":
            raise ValueError(
                f"{type(self).__name__} has groups=1 and padding_mode='zeros' only, not {groups} and {padding_mode!r}"
            )
        self.in_channels, self.out_channels, self._dim = in_channels, out_channels, dim
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None

    def _add_parameters(
        self,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        init_method: InitMethod | None,
        keep_master_weight: bool,
        partition_pad: bool,
    ) -> None:
        divided, ranks = (self.out_channels, self.in_channels)[self._dim], self.tensor_parallel_size
        if divided % ranks and not partition_pad:
            raise ValueError(
                f"{type(self).__name__} divides {divided} channels, which is no multiple of the tensor-parallel size "
                f"{ranks}: give a multiple, or partition_pad=True"
            )
        self.padded_channels = math.ceil(divided / ranks) * ranks
        self.keep_master_weight, self._init_method = keep_master_weight, init_method
        self.master_weight: torch.Tensor | None = None
        self.master_bias: torch.Tensor | None = None
        shape = (self.out_channels, self.in_channels, *self.kernel_size)
        self._add_part("weight", shape, self._dim, dtype, device, padded=self.padded_channels)
        if not bias:
            self.register_parameter("bias", None)
        elif self._dim == 0:
            self._add_part("bias", (self.out_channels,), 0, dtype, device, padded=self.padded_channels)
        else:
            self.bias = nn.Parameter(torch.empty(self.out_channels, dtype=dtype, device=given_device(device)))
            set_tensor_model_parallel_attributes(self.bias, False, -1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weight and bias."""
        self.master_weight = fill_parameter(self.weight, self._init_method or init_as_torch, self.keep_master_weight)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
            self.master_bias = fill_parameter(
                self.bias, lambda whole: init.uniform_(whole, -bound, bound), self.keep_master_weight
            )

    def _convolved(self, input_: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.conv2d(input_, self.weight, bias, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        """Sizes, in the form of ``torch.nn.Conv2d``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, bias={self.bias is not None}, tensor_parallel_size={self.tensor_parallel_size}"
        )


class OutputChannelParallelConv2d(_ParallelConv2d):
    """``torch.nn.Conv2d`` whose output channels are divided over the tensor-parallel ranks; the bias too.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias: as in ``torch.nn.Conv2d``.
        groups, padding_mode: 1 and ``"zeros"``.
        gather_output: return all channels on each rank, else this rank's part.
        dtype, device, init_method: as in ``ColumnParallelLinear``.
        keep_master_weight: keep the initial wholes on the CPU as ``master_weight`` and ``master_bias``.
        partition_pad: pad a number of channels that does not divide; padding is no part of a gathered output.

    Shape: ``(B, I, H, W)`` -> ``(B, O, H', W')``, or ``(B, O / ranks, H', W')``.

    Raises ``ValueError`` for channels that do not divide, for groups and for other padding modes, and ``TypeError`` for
    a ``padding`` that is a name.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Sizes,
        stride: _Sizes = 1,
        padding: _Sizes = 0,
        dilation: _Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, 0, kernel_size, stride, padding, dilation, groups, padding_mode)
        self._add_parameters(bias, dtype, device, init_method, keep_master_weight, partition_pad)
        self.gather_output = gather_output

    def forward(self, in_tensor: torch.Tensor) -> torch.Tensor:
        """Return the convolution, or this rank's channels of it; the gradient of the input sums all ranks."""
        self._check_group()
        output = self._convolved(mappings.copy_to_tensor_model_parallel_region(in_tensor), self.bias)
        if not self.gather_output:
            return output
        gathered = mappings.gather_from_tensor_model_parallel_region_with_dim(output, _CHANNELS)
        return gathered.narrow(_CHANNELS, 0, self.out_channels)


class InputChannelParallelConv2d(_ParallelConv2d):
    """``torch.nn.Conv2d`` whose input channels are divided over the tensor-parallel ranks.

    Each rank has a copy of the bias.

    Args:
        input_is_parallel: each rank gives its channels, with padding.
        other arguments: as in ``OutputChannelParallelConv2d``.

    Shape: ``(B, I, H, W)``, or ``(B, I / ranks, H, W)`` with ``input_is_parallel`` -> ``(B, O, H', W')``.

    Raises as ``OutputChannelParallelConv2d`` does.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Sizes,
        stride: _Sizes = 1,
        padding: _Sizes = 0,
        dilation: _Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, 1, kernel_size, stride, padding, dilation, groups, padding_mode)
        self._add_parameters(bias, dtype, device, init_method, keep_master_weight, partition_pad)
        self.input_is_parallel = input_is_parallel

    def forward(self, in_tensor: torch.Tensor) -> torch.Tensor:
        """Return the convolution, the sum of all ranks' products."""
        self._check_group()
        if not self.input_is_parallel:
            missing = self.padded_channels - self.in_channels
            padded = functional.pad(in_tensor, (0, 0, 0, 0, 0, missing)) if missing else in_tensor
            in_tensor = mappings.scatter_to_tensor_model_parallel_region_with_dim(padded, _CHANNELS)
        total = mappings.reduce_from_tensor_model_parallel_region(self._convolved(in_tensor, None))
        return total if self.bias is None else total + self.bias.to(total.dtype)[:, None, None]


def _pair(sizes: _Sizes) -> tuple[int, int]:
    if isinstance(sizes, str):
        raise TypeError(
            f"sizes of a parallel convolution are numbers or pairs of numbers, not {sizes!r}: for padding='same' give "
            f"dilation * (kernel_size - 1) // 2"
        )
    return (sizes, sizes) if isinstance(sizes, int) else (sizes[0], sizes[1])
