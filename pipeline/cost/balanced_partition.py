"""Cuts that give each stage the same work, for microbatches of a given shape.

``partition="balanced"`` counts the work of every node of the model's graph, ``"profiled"`` measures it; both find the
cut between layers whose slowest stage is fastest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.first_rank import from_first_rank
from nxdpp.pipeline.cost.count import NodeCost, count_costs
from nxdpp.pipeline.cost.layer_costs import layer_costs, shared_bytes
from nxdpp.pipeline.cost.measure import profile_nodes
from nxdpp.pipeline.partition.assignment import place_nodes
from nxdpp.pipeline.partition.balance import MemoryLimit, balanced_cuts
from nxdpp.pipeline.partition.cuts import check_cuts
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.in_flight import in_flight
from nxdpp.tracing.trace import TracedGraph

_PARTITIONS = ("even", "balanced", "profiled")


def check_partition(
    partition: Any, batch: Any, memory_limit: Any, pipeline_cuts: Sequence[str] | None, auto_partition: bool | None
) -> None:
    """Raise ``ValueError`` for a way to cut that is none, that lacks what it needs, or for two ways at once."""
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int)):
        raise ValueError(f"partition_memory_limit={memory_limit!r} must be a whole number of bytes: 80 * 2**30.")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"partition_memory_limit={memory_limit} must be at least one byte.")
    if partition not in _PARTITIONS:
        raise ValueError(f"partition={partition!r} must be one of {', '.join(map(repr, _PARTITIONS))}.")
    if partition == "even":
        if batch is not None:
            _check_batch(partition, batch)
        if memory_limit is not None:
            raise ValueError(
                "partition_memory_limit is for partition='balanced' and 'profiled'; the even partition and "
                "pipeline_cuts look at no memory."
            )
        return
    if pipeline_cuts is not None or auto_partition:
        other = "pipeline_cuts" if pipeline_cuts is not None else "auto_partition=True, the even partition,"
        raise ValueError(f"partition={partition!r} and {other} exclude each other: give one of them.")
    _check_batch(partition, batch)


def _check_batch(partition: str, batch: Any) -> None:
    if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise ValueError(
            f"partition={partition!r} needs partition_batch to be the inputs of one microbatch with labels, whose "
            f"shapes decide. Meta tensors will do: dict(input_ids=torch.empty(1, 2048, dtype=torch.int64, "
            f"device='meta'), labels=...)."
        )
    others = [name for name, value in batch.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"partition_batch takes tensors only; these are none: {others}.")


def cuts_by_cost(
    traced: TracedGraph,
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    layers: Sequence[str],
    partition: str,
    schedule: ChosenSchedule,
    memory_limit: int | None,
) -> list[str]:
    """The layers after which to cut so that the slowest stage has the least work for microbatches like ``batch``.

    ``"balanced"``: the same on every rank, because work is counted and not measured; not collective.
    ``"profiled"``: measured on global rank 0, on its device, and told to the others; collective over all ranks.

    ``traced`` is the graph of ``module`` for ``batch``. Raises ``ValueError`` where there are fewer layers than stages,
    or no cut fits into ``memory_limit`` bytes a rank under ``schedule``; what a layer raises that fails
    while it is measured, on every rank.
    """
    placement = schedule.placement
    if placement.stages != placement.ranks * placement.chunks:
        raise ValueError(
            f"partition={partition!r} needs as many stages on each rank; the schedule has {placement.stages} on "
            f"{placement.ranks} ranks. Use partition='even' or pipeline_cuts."
        )
    if partition == "profiled":
        parallel_state.refuse_in_debug('partition="profiled"')
    device = parallel_state.local_device()

    def cuts() -> list[str]:
        costs = count_costs(traced, module, batch, device)
        if partition == "profiled":
            costs = _measured(traced, module, batch, costs, layers, device)
        memory = None
        if memory_limit is not None:
            shared = shared_bytes(traced, module, costs, layers)
            memory = MemoryLimit(memory_limit, in_flight(schedule.training), shared)
        names = balanced_cuts(
            layer_costs(traced, module, costs, layers),
            placement.ranks,
            placement.chunks,
            memory,
            [placement.rank_of(stage) for stage in range(placement.stages)],
        )
        return check_cuts(names, layers, placement.stages)

    return from_first_rank(cuts) if partition == "profiled" else cuts()


def _measured(
    traced: TracedGraph,
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    costs: Mapping[fx.Node, NodeCost],
    layers: Sequence[str],
    device: torch.device,
) -> dict[fx.Node, NodeCost]:
    """``costs`` with seconds on ``device`` as their work."""
    timed = place_nodes(traced, module, {layer: index for index, layer in enumerate(layers)})
    seconds = profile_nodes(traced, module, batch, timed, device)
    return {node: replace(cost, work=seconds.get(node, 0.0)) for node, cost in costs.items()}
