"""Values that the first ranks send to the others, through host memory.

::

    rank 0 ─ data group ─▶ its place in each unit ─ pipeline group ─▶ first tensor ranks ─ tensor group ─▶ all
"""

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.same_values import sample
from nxdpp.agreement.together import from_all_ranks
from nxdpp.counted import counted
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import broadcast_value

K = TypeVar("K")


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
    everyones = from_all_ranks([sample(tensor, tensor.numel()) for _, tensor in tensors])
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
        send(tensor, is_everywhere=True)


def send(tensor: torch.Tensor, is_everywhere: bool, sources: int = 1) -> None:
    """Give ``tensor`` the values of the first units, in place; collective over the data group.

    Args:
        tensor: a parameter or buffer of this rank.
        is_everywhere: all ranks hold it, and take it from rank 0; collective over all ranks.
        sources: number of units that have values. Unit ``u`` takes the values of unit ``u % sources``.
    """
    values = tensor.detach().cpu().contiguous()
    of_units, *of_unit = _groups(is_everywhere)
    for source in range(sources):
        is_own = parallel_state.get_data_parallel_rank() % sources == source
        _broadcast(values if is_own else torch.empty_like(values), of_units, source)
    for group in of_unit:
        _broadcast(values, group, 0)
    with torch.no_grad():
        tensor.copy_(values)


def send_state(values: Mapping[str, Any], is_everywhere: bool) -> dict[str, Any]:
    """Return the optimizer state ``values`` of unit 0 for one parameter; collective over the data group.

    With ``is_everywhere`` rank 0 sends it, and the call is collective over all ranks.
    """
    for group in _groups(is_everywhere):
        if dist.get_world_size(group) > 1:
            values = _shared_state(values, group)
    return dict(values)


def send_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` and ``masters`` of the shards of the first of several groups of units.

    Collective over the data group. A unit takes those of the unit at its place in the first group.
    """
    kept = {("state", number, key): value for number, own in state["state"].items() for key, value in own.items()}
    kept |= {("masters", number, ""): value for number, value in state["masters"].items()}
    group = parallel_state.get_data_parallel_control_group()
    units = state["data_parallel"]["size"]
    received: dict[str, dict[int, Any]] = {"state": {}, "masters": {}}
    for source in range(units):
        values = _shared_state(kept, group, source)
        if parallel_state.get_data_parallel_rank() % units == source:
            received["masters"] = {number: value for (kind, number, _), value in values.items() if kind == "masters"}
            for (kind, number, key), value in values.items():
                if kind == "state":
                    received[kind].setdefault(number, {})[key] = value
    return received


def _shared_state(values: Mapping[K, Any], group: ProcessGroup, source: int = 0) -> dict[K, Any]:
    # Tensors of one number go with the description of the others.
    own = {key: (value.shape, value.dtype) if _is_large(value) else value for key, value in values.items()}
    received: dict[K, Any] = {}
    for key, value in broadcast_value(own, group, source).items():
        if isinstance(value, tuple):
            shape, dtype = value
            is_source = dist.get_rank(group) == source
            value = values[key] if is_source else torch.empty(shape, dtype=dtype, device="cpu")
            value = value.detach().cpu().contiguous()
            _broadcast(value, group, source)
        received[key] = value
    return received


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _groups(is_everywhere: bool) -> list[ProcessGroup]:
    """The groups through which values of rank 0 reach the units, or with ``is_everywhere`` all ranks."""
    data = parallel_state.get_data_parallel_control_group()
    if not is_everywhere:
        return [data]
    return [data, parallel_state.get_pipeline_control_group(), parallel_state.get_tensor_control_group()]


def _broadcast(message: torch.Tensor, group: ProcessGroup, source: int) -> None:
    """Give the contiguous ``message`` in host memory the values of rank ``source`` of ``group``."""
    if dist.get_world_size(group) > 1 and message.numel():
        # Bytes: gloo does not know all dtypes.
        with Wait("values of rank 0", group):
            dist.broadcast(message.view(-1).view(torch.uint8), group=group, group_src=source)
