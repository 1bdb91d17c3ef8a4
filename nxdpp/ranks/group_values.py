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


def gather_values(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return a copy of the ``value`` of each rank of ``group``, for CPU tensors; collective over it."""
    if dist.get_world_size(group) == 1:
        return [unpacked(packed(value))]
    own = _bytes_of(packed(value))
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    with Wait("exchange of values", group):
        dist.all_gather(lengths, torch.tensor([own.numel()], device="cpu"), group=group)
        longest = max(map(int, lengths))
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        forms = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in lengths]
        dist.all_gather(forms, padded, group=group)
    return [unpacked(form[: int(length)].numpy().tobytes()) for form, length in zip(forms, lengths, strict=True)]


def from_rank_0(value: T) -> T:
    """Return a copy of ``value`` of rank 0 on all ranks; collective over them.

    It passes along each dimension in turn: a world of NCCL takes no CPU tensors.
    """
    for group in current_state.with_groups().control_groups.values():
        if dist.get_world_size(group) > 1:
            value = broadcast_value(value, group)
    return value


def broadcast_value(value: T | None, group: dist.ProcessGroup, source: int = 0) -> T:
    """Return a copy of ``value`` of the rank ``source`` of ``group``, for CPU tensors; collective over it."""
    is_source = dist.get_rank(group) == source
    form = _bytes_of(packed(value) if is_source else b"")
    length = torch.tensor([form.numel()], device="cpu")
    with Wait("exchange of values", group):
        dist.broadcast(length, group=group, group_src=source)
        if not is_source:
            form = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        dist.broadcast(form, group=group, group_src=source)
    read: T = unpacked(form.numpy().tobytes())
    return read


def _bytes_of(form: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(form), dtype=torch.uint8) if form else torch.empty(0, dtype=torch.uint8)


_CPU = torch.device("cpu")


def extremes(
    numbers: Sequence[float], group: ProcessGroup | None, device: torch.device = _CPU, dtype: torch.dtype = torch.int64
) -> tuple[list[Any], list[Any]]:
    """Return the smallest and the largest of all ranks of ``group``, for each of ``numbers``; collective over it.

    ``None`` stands for all ranks. ``group`` takes tensors of ``device``. Numbers are exact within ``dtype``.
    """
    if group is not None and dist.get_world_size(group) == 1:
        return list(numbers), list(numbers)
    both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=dtype, device=device)
    with Wait("comparison of numbers", group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
    # The maximum of the negated values is the negated minimum.
    largest, negated = both.view(2, -1).tolist()
    return [-number for number in negated], largest
