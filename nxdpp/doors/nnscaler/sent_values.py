"""Values that the first ranks send to the others, through host memory."""

import warnings
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.same_values import sample
from nxdpp.counted import counted
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.group_values import broadcast_value, from_rank_0

T = TypeVar("T")


def take_first_values(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, in new memory; collective over all ranks.

    nnScaler keeps the values of the module that rank 0 has traced. Nothing is sent if all ranks have equal values.
    Tensors on the meta device have no values to compare.

    Raises ``ValueError`` for modules with different names, shapes or dtypes than on rank 0.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    found = unequal([f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors])
    if found is not None:
        pairs = zip(*([*kinds, "nothing"] for kinds in found.values), strict=False)
        there, here = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(f"rank {found.ranks[1]} gave another module than rank 0: it has {here}, and rank 0 {there}")
    everyones = Exchange().gather([sample(tensor, tensor.numel()) for _, tensor in tensors])
    differ = [each for each, digests in zip(tensors, zip(*everyones, strict=True), strict=True) if len({*digests}) > 1]
    if not differ:
        return
    warnings.warn(
        f"the ranks gave modules with other values ({differ[0][0]} is the first of {counted(len(differ), 'tensor')}): "
        f"all take those of rank 0",
        stacklevel=4,
    )
    for _, tensor in differ:
        tensor.data = tensor.detach().clone()
        tensor.data.copy_(from_rank_0(tensor.detach()))


def of_first_units(value: T, is_everywhere: bool = False, sources: int = 1) -> T:
    """Return a copy of the ``value`` of a first unit, with tensors in host memory; collective over the data group.

    Args:
        value: of this rank.
        is_everywhere: all ranks take the value of rank 0; collective over all ranks.
        sources: number of units that have values. Unit ``u`` takes the value of unit ``u % sources``.
    """
    group = parallel_state.get_data_parallel_control_group()
    if is_everywhere:
        return from_rank_0(value)
    if dist.get_world_size(group) == 1:
        return value
    place = parallel_state.get_data_parallel_rank() % sources
    received = value
    for source in range(sources):
        sent = broadcast_value(value, group, source)
        received = sent if source == place else received
    return received
