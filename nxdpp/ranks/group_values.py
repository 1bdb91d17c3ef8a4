"""Values of ranks for all ranks of a group: any in the fixed form of ``wire_form``, and extremes of numbers.

A group of one rank sends nothing: it may be one of a device, whose backend takes no CPU tensors.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.ranks import current_state
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.wire_form import packed, unpacked

T = TypeVar("T")


# Bytes of the first message of each rank, which has a length and a form. A longer form continues in a second one.
_FIRST = 1024
_LENGTH = 8


def gather_values(value: T, group: dist.ProcessGroup, name: str = "exchange of values") -> list[T]:
    """Return a copy of the ``value`` of each rank of ``group``, for CPU tensors; collective over it.

    ``name`` is of the wait for the others.
    """
    if dist.get_world_size(group) == 1:
        return [unpacked(packed(value))]
    own = _message_of(value)
    messages = [_empty(_FIRST) for _ in range(dist.get_world_size(group))]
    with Wait(name, group):
        dist.all_gather(messages, own[:_FIRST], group=group)
        if longest := max(map(_more, messages)):
            rests = [_empty(longest) for _ in messages]
            dist.all_gather(rests, torch.cat([own[_FIRST:], _empty(longest - _more(own))]), group=group)
            messages = [torch.cat(both) for both in zip(messages, rests, strict=True)]
    return list(map(_value_in, messages))


def from_rank_0(value: T) -> T:
    """Return a copy of ``value`` of rank 0 on all ranks; collective over them.

    It passes along each dimension in turn: a world of NCCL takes no CPU tensors.
    """
    for group in current_state.with_groups().control_groups.values():
        if dist.get_world_size(group) > 1:
            value = broadcast_value(value, group)
    return value


def broadcast_value(value: T | None, group: dist.ProcessGroup, source: int = 0, name: str = "exchange of values") -> T:
    """Return a copy of ``value`` of the rank ``source`` of ``group``; as ``gather_values``."""
    is_source = dist.get_rank(group) == source
    message = _message_of(value) if is_source else _empty(_FIRST)
    with Wait(name, group):
        dist.broadcast(message[:_FIRST], group=group, group_src=source)
        if more := _more(message):
            message = message if is_source else torch.cat([message, _empty(more)])
            dist.broadcast(message[_FIRST:], group=group, group_src=source)
    read: T = _value_in(message)
    return read


def _message_of(value: Any) -> torch.Tensor:
    form = packed(value)
    whole = len(form).to_bytes(_LENGTH, "little") + form
    return torch.frombuffer(bytearray(whole.ljust(_FIRST, b"\0")), dtype=torch.uint8)


def _value_in(message: torch.Tensor) -> Any:
    return unpacked(message[_LENGTH : _LENGTH + _length(message)].numpy().tobytes())


def _more(message: torch.Tensor) -> int:
    """Bytes that follow the first message."""
    return max(0, _LENGTH + _length(message) - _FIRST)


def _length(message: torch.Tensor) -> int:
    return int.from_bytes(message[:_LENGTH].numpy().tobytes(), "little")


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


_CPU = torch.device("cpu")


def extremes(
    numbers: Sequence[float],
    group: ProcessGroup | None,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.int64,
    name: str = "comparison of numbers",
) -> tuple[list[Any], list[Any]]:
    """Return the smallest and the largest of all ranks of ``group``, for each of ``numbers``; collective over it.

    ``None`` stands for all ranks. ``group`` takes tensors of ``device``. Numbers are exact within ``dtype``. ``name``
    is of the wait for the others.
    """
    if not numbers or (group is not None and dist.get_world_size(group) == 1):
        return list(numbers), list(numbers)
    own = torch.tensor(numbers, dtype=dtype, device=device)
    # The maximum of the inverted values is the inverted minimum. Every integer has an inverse, and not a negative.
    both = torch.stack([own, -own if dtype.is_floating_point else ~own])
    with Wait(name, group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
    largest, inverted = both.tolist()
    return [-each if dtype.is_floating_point else ~each for each in inverted], largest
