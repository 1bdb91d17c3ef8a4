"""Smallest and largest numbers of the ranks of a group, by one all-reduce."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.ranks.faults.waits import Wait

_CPU = torch.device("cpu")


def extremes(
    numbers: Sequence[float],
    group: ProcessGroup | None,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.int64,
) -> tuple[list[Any], list[Any]]:
    """Return the smallest and the largest of all ranks of ``group``, for each of ``numbers``; collective over it.

    ``None`` stands for all ranks. ``group`` takes tensors of ``device``. Numbers are exact within ``dtype``.
    """
    both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=dtype, device=device)
    with Wait("comparison of numbers", group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
    # The maximum of the negated values is the negated minimum.
    largest, negated = both.view(2, -1).tolist()
    return [-number for number in negated], largest
