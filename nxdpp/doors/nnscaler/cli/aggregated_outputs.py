"""Sums over the micro-batches of a step: losses, and what losses and gradients are divided by."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.doors.nnscaler.end2end import loss_of
from nxdpp.ranks.faults.waits import Wait


@dataclass
class AggregatedOutputs:
    """Sums over the micro-batches of a step, of all units: losses, micro-batches, and tokens if they are counted."""

    loss_sum: float = 0.0
    num_batches: int = 0
    num_tokens: int | None = None
    aggregated_outputs: Any = None


def sums_over_units(outputs: list[Any], group: ProcessGroup) -> AggregatedOutputs:
    """Sum the losses of the micro-batches of all units, in float64; collective over ``group``."""
    losses = torch.stack([loss_of(output).detach().reshape(()) for output in outputs])
    sums = torch.stack([losses.sum(dtype=torch.float64), torch.full_like(losses[0], len(outputs), dtype=torch.float64)])
    with Wait("sum of the losses", group):
        dist.all_reduce(sums, group=group)
    return AggregatedOutputs(sums[0].item(), int(sums[1].item()))


def divisor_of(reduction: str, outputs: AggregatedOutputs) -> float:
    """Return what the sums of a step are divided by. Raises ``RuntimeError`` for numbers that were not counted."""
    divisor = {"sum": 1, "mean": outputs.num_batches, "per-token-mean": outputs.num_tokens}[reduction]
    if not divisor:
        raise RuntimeError(f"{reduction} needs numbers above 0 in the AggregatedOutputs of aggregate_outputs_fn")
    return divisor
