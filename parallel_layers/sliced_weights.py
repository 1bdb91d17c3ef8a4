"""Initial weights of a part of a parameter, equal to that part of the whole parameter in one process."""

from collections.abc import Callable

import torch
from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.utils import local_slice

InitMethod = Callable[[torch.Tensor], object]


def fill_parameter(parameter: nn.Parameter, size: int, init_method: InitMethod) -> None:
    """Write what this rank holds of a tensor that ``init_method`` initialises.

    The random generator ends in the state that it has after the whole tensor. A meta tensor stays as it is.

    Args:
        parameter: with attributes that tell how the whole is divided, see ``tensor_attributes``.
        size: of the whole tensor along its divided dimension. Parts behind it, of a padded tensor, are zero.
        init_method: initialises the whole tensor in place, such as ``torch.nn.init.normal_``.
    """
    if parameter.is_meta:
        return
    shape = list(parameter.shape)
    dim = vars(parameter)["partition_dim"]
    if dim >= 0:
        shape[dim] = size
    with torch.no_grad():
        whole = torch.empty(shape, dtype=parameter.dtype, device="cpu")
        init_method(whole)
        parameter.copy_(whole if dim < 0 else _own_part(whole, parameter, dim))


def _own_part(whole: torch.Tensor, parameter: nn.Parameter, dim: int) -> torch.Tensor:
    ranks, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    missing = list(whole.shape)
    missing[dim] = parameter.shape[dim] * ranks - whole.shape[dim]
    if missing[dim]:
        whole = torch.cat([whole, whole.new_zeros(missing)], dim)
    return local_slice(whole, dim, rank, ranks, vars(parameter)["partition_stride"])
