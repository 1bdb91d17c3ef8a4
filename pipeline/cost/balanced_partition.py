"""Policies that give each rank the same work, for microbatches of a given shape.

``partition="balanced"`` counts the work of every node of the traced graph. ``"profiled"`` measures it. Both choose the
cuts whose slowest rank has the least work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.all_ranks import from_first_rank
from nxdpp.pipeline.cost.count import NodeCost, count_costs
from nxdpp.pipeline.cost.layer_costs import layer_costs, shared_bytes
from nxdpp.pipeline.cost.measure import profile_nodes
from nxdpp.pipeline.partition.assignment import assign_layers
from nxdpp.pipeline.partition.balance import MemoryLimit, balanced_cuts
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.in_flight import in_flight
from nxdpp.schedules.placement import ListedPlacement, Placement
from nxdpp.tracing.trace import TracedGraph


@dataclass(frozen=True)
class CostPolicy:
    """Policy: choose the cuts whose slowest rank has the least work.

    ``"balanced"`` counts work, equally on every rank, and is not collective. ``"profiled"`` measures it on global rank
    0, on its device, and is collective over all ranks.

    Args:
        module: the model that is cut.
        batch: inputs of one microbatch with labels. Meta tensors are allowed.
        how: ``"balanced"`` or ``"profiled"``.
        schedule: decides how many microbatches are in flight on each stage.
        memory_limit: bytes of one rank; ``None`` for no limit.

    A call raises ``ValueError`` for fewer layers than stages, and where no cut fits into the memory. An error of a
    layer that is measured is raised on every rank.
    """

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    how: str
    schedule: ChosenSchedule
    memory_limit: int | None = None

    @property
    def source(self) -> str:
        """The argument that asked for this policy, for messages."""
        return f"partition={self.how!r}"

    def __call__(self, traced: TracedGraph, stages: int) -> Sequence[str]:
        """Return the layers after which to cut."""
        placement = self.schedule.placement
        if stages != placement.ranks * placement.chunks:
            raise ValueError(
                f"{self.source} needs as many stages on each rank; the schedule has {stages} on {placement.ranks} "
                f"ranks. Use partition='even' or pipeline_cuts."
            )
        if self.how == "balanced":
            return self._cuts(traced, count_costs(traced, self.module, self.batch, parallel_state.local_device()))
        parallel_state.refuse_in_debug('partition="profiled"')
        return from_first_rank(lambda: self._cuts(traced, self._measure(traced)))

    def _cuts(self, traced: TracedGraph, costs: Mapping[fx.Node, NodeCost]) -> list[str]:
        held = [] if self.memory_limit is None else in_flight(self.schedule.training)
        return balance(traced, self.module, costs, self.schedule.placement, self.memory_limit, held)

    def _measure(self, traced: TracedGraph) -> dict[fx.Node, NodeCost]:
        """Return counted costs, with measured seconds as their work."""
        device = parallel_state.local_device()
        costs = count_costs(traced, self.module, self.batch, device)
        timed = assign_layers(traced, self.module, traced.layers)
        seconds = profile_nodes(traced, self.module, self.batch, timed, device)
        return {node: replace(cost, work=seconds.get(node, 0.0)) for node, cost in costs.items()}


def balance(
    traced: TracedGraph,
    module: nn.Module,
    costs: Mapping[fx.Node, NodeCost],
    placement: Placement | ListedPlacement,
    memory_limit: int | None,
    microbatches_in_flight: Sequence[int],
) -> list[str]:
    """Return the cuts whose slowest rank has the least work.

    Args:
        traced: the graph of ``module``.
        module: the model.
        costs: of the nodes of ``traced``.
        placement: of the stages.
        memory_limit: bytes of one rank; ``None`` for no limit.
        microbatches_in_flight: the most on each stage. Only a memory limit needs it.
    """
    memory = None
    if memory_limit is not None:
        shared = shared_bytes(traced, module, costs, traced.layers)
        memory = MemoryLimit(memory_limit, microbatches_in_flight, shared)
    return balanced_cuts(
        layer_costs(traced, module, costs, traced.layers),
        placement.ranks,
        placement.chunks,
        memory,
        [placement.rank_of(stage) for stage in range(placement.stages)],
    )
