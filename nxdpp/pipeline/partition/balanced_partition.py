"""Partition policies by cost: ``partition="balanced"`` counts work, ``"profiled"`` measures it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from nxdpp.devices.kinds import kind_of
from nxdpp.pipeline.partition.assignment import assign_layers
from nxdpp.pipeline.partition.layer_costs import layer_costs, shared_bytes
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.transfer_groups import communicators
from nxdpp.schedules.balance import MemoryLimit, balanced_cuts
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.simulate import in_flight
from nxdpp.tracing.costs.count import NodeCost, count_costs
from nxdpp.tracing.costs.measure import measure_nodes
from nxdpp.tracing.graph.trace import TracedGraph

_CPU = torch.device("cpu")
# A communicator of NCCL with its default buffers. The figure is published; it was not measured here.
COMMUNICATOR_BYTES = 100 * 2**20
# The most receives that a family posts ahead, and two sends in flight each way: their memory is freed late.
MESSAGES_HELD = 7 + 2 * 2


@dataclass(frozen=True)
class CostPolicy:
    """Policy: choose the cuts whose slowest rank has the least work.

    ``"balanced"`` counts work on every rank and gets the same result. It is not collective. ``"profiled"`` measures
    work on the device of global rank 0. All ranks must call it.

    Args:
        module: the model.
        batch: inputs of one microbatch with labels. Meta tensors are allowed.
        how: ``"balanced"`` or ``"profiled"``.
        schedule: gives the placement and the number of microbatches in flight on each stage.
        memory_limit: bytes of one rank. ``None`` for no limit.
        zero1: the limit is for optimizer state that the replicas share (ZeRO-1).

    Raises:
        ValueError: when called, for fewer layers than stages, or if no cut fits into the memory.
        Exception: when called, an error of a measured layer, on every rank.
    """

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    how: str
    schedule: ChosenSchedule
    memory_limit: int | None = None
    zero1: bool = False

    @property
    def source(self) -> str:
        """Argument that chose this policy, for messages."""
        return f"partition={self.how!r}"

    def __call__(self, traced: TracedGraph, stages: int) -> Sequence[str]:
        """Return the names of the layers after which to cut."""
        placement = self.schedule.placement
        if stages != placement.ranks * placement.chunks:
            raise ValueError(
                f"{self.source} needs the same number of stages on each rank; the schedule has {stages} stages on "
                f"{placement.ranks} ranks. Use partition='even' or pipeline_cuts."
            )
        device, replicas = parallel_state.local_device(), parallel_state.get_replica_size()
        tensor = parallel_state.get_tensor_model_parallel_size()
        if self.how == "balanced":
            return self.cuts(traced, count_costs(traced, self.module, self.batch, device), device, replicas, tensor)
        parallel_state.refuse_in_debug('partition="profiled"')
        with board.call("a construction with partition='profiled'"):
            return Exchange().from_first(
                lambda: self.cuts(
                    traced, measured_costs(traced, self.module, self.batch, device), device, replicas, tensor
                )
            )

    def cuts(
        self,
        traced: TracedGraph,
        node_costs: Mapping[fx.Node, NodeCost],
        device: torch.device = _CPU,
        replicas: int = 1,
        tensor: int = 1,
    ) -> list[str]:
        """Return the cuts for the cost of each node of ``traced``; not collective.

        On a CUDA ``device`` communicators and messages take a part of the memory.
        """
        placement, memory = self.schedule.placement, None
        if self.memory_limit is not None:
            peaks = in_flight(self.schedule.training)
            transport = transport_bytes(traced, node_costs, device, placement.ranks, replicas, tensor)
            shared = shared_bytes(traced, self.module, node_costs)
            memory = MemoryLimit(self.memory_limit, peaks, shared, transport)
        rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        costs = layer_costs(traced, self.module, node_costs, replicas if self.zero1 else None)
        return balanced_cuts(costs, placement.ranks, placement.chunks, memory, rank_of)


def measured_costs(
    traced: TracedGraph, module: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> dict[fx.Node, NodeCost]:
    """Return counted costs, with measured seconds as their work."""
    seconds = measure_nodes(traced, module, batch, assign_layers(traced, module, traced.layers), device)
    node_costs = count_costs(traced, module, batch, device)
    return {node: replace(cost, work=sum(seconds.get(node, ()))) for node, cost in node_costs.items()}


def transport_bytes(
    traced: TracedGraph,
    node_costs: Mapping[fx.Node, NodeCost],
    device: torch.device,
    ranks: int,
    replicas: int,
    tensor: int = 1,
) -> int:
    """Return the bytes that the transport takes on each rank: communicators, and the messages that it holds.

    On the CPU gloo's connections have buffers of kilobytes, and host memory frees a message at once. A link of shared
    memory keeps slots for the messages that were in flight at once; only a plan for CPUs counts them (``rank_memory``).

    Args:
        traced: the graph of a microbatch.
        node_costs: cost of each of its nodes.
        device: device of the stages.
        ranks: number of ranks of the pipeline.
        replicas: number of data-parallel replicas.
        tensor: tensor-parallel size.
    """
    if kind_of(device.type).backend == "gloo":
        return 0
    layers = [node for node in node_costs if node.op == "call_module" and node.target in traced.layers]
    # The largest value that a layer sends to another stage.
    message = max((node_costs[node].output_bytes for node in layers), default=0)
    return communicators(ranks, replicas, tensor) * COMMUNICATOR_BYTES + MESSAGES_HELD * message
