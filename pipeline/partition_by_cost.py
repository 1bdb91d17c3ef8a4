"""Cuts that give each stage the same work, for microbatches of a given shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.balance import balanced_cuts
from nxdpp.pipeline.costs import count_costs
from nxdpp.pipeline.layer_costs import layer_costs
from nxdpp.pipeline.placement import check_layers_ran
from nxdpp.tracing.kinds import InputKind
from nxdpp.tracing.trace import TracingOptions, trace

_PARTITIONS = ("even", "balanced")


def check_partition(
    partition: Any, batch: Any, pipeline_cuts: Sequence[str] | None, auto_partition: bool | None
) -> None:
    """Raise ``ValueError`` for a way to cut that is none, that lacks what it needs, or for two ways at once."""
    if partition not in _PARTITIONS:
        raise ValueError(f"partition={partition!r} must be one of {', '.join(map(repr, _PARTITIONS))}.")
    if partition == "even":
        if batch is not None:
            raise ValueError("partition_batch is for partition='balanced'; the even partition looks at no inputs.")
        return
    if pipeline_cuts is not None or auto_partition:
        other = "pipeline_cuts" if pipeline_cuts is not None else "auto_partition=True, the even partition,"
        raise ValueError(f"partition={partition!r} and {other} exclude each other: give one of them.")
    if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise ValueError(
            f"partition={partition!r} needs partition_batch, the inputs of one microbatch with labels: costs depend on "
            f"its shape. Tensors on the meta device will do: dict(input_ids=torch.empty(1, 2048, dtype=torch.int64, "
            f"device='meta'), labels=...)."
        )
    others = [name for name, value in batch.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"partition_batch takes tensors only; these are none: {others}.")


def cuts_by_cost(
    module: nn.Module, batch: Mapping[str, torch.Tensor], options: TracingOptions, layers: Sequence[str], stages: int
) -> list[str]:
    """The layers after which to cut so that the slowest of ``stages`` has the fewest FLOPs for ``batch``.

    The same on every rank, because FLOPs are counted and not measured; not collective. Raises ``ValueError``
    where there are fewer layers than stages, or ``batch`` takes the model through other layers.
    """
    traced = trace(module, {name: InputKind(value.ndim, value.dtype) for name, value in batch.items()}, {}, options)
    check_layers_ran(traced, layers)
    costs = count_costs(traced, module, batch)
    return balanced_cuts(layer_costs(traced, module, costs, layers), stages)
