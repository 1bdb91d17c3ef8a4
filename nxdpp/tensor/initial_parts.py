"""Initial values of a part of a parameter, equal to that part of the whole parameter in one process.

The whole is in memory, on the CPU, until the rank has taken its part. Inside ``deferred_init`` the constructor draws
nothing, and the whole is in memory when the part is materialised.
"""

from collections.abc import Callable

import torch
from torch import nn

from nxdpp.initialization.named_streams import drawn_as
from nxdpp.tensor.padding import copy_own

InitMethod = Callable[[torch.Tensor], object]
"""Initialises a whole tensor in place, such as ``torch.nn.init.normal_``."""


def refuse_master_weight(keep: bool) -> None:
    """Raise ``ValueError`` for a layer that is to ``keep`` its initial whole weight."""
    if keep:
        raise ValueError(
            "keep_master_weight=True: no layer keeps its initial whole weight. Leave it out; gather_state_dict joins "
            "the parts"
        )


def fill_parameter(parameter: nn.Parameter, init_method: InitMethod) -> None:
    """Write what this rank holds of a tensor that ``init_method`` initialises; a meta tensor stays as it is.

    The CPU's generator ends in the state that it has after the whole tensor. The attributes of ``parameter`` tell how
    the whole is divided, see ``tensor_attributes``; its padding gets zeros.
    """
    if parameter.is_meta:
        return
    dim = vars(parameter)["partition_dim"]
    with torch.no_grad():
        values = parameter if parameter.device.type == "cpu" else torch.empty_like(parameter, device="cpu")
        shape = list(values.shape)
        if dim >= 0:
            shape[dim] = vars(parameter)["whole_size"]
        if dim < 0 or (vars(parameter)["num_partitions"] == 1 and shape == list(values.shape)):
            init_method(values)
        else:
            whole = torch.empty(shape, dtype=values.dtype, device="cpu")
            with drawn_as(whole, values):
                init_method(whole)
            copy_own(whole, values.zero_(), parameter)
        if values is not parameter:
            parameter.copy_(values)
