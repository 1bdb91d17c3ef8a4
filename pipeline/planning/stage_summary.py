"""Work, memory and sent tensors of each stage of a pipeline, before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from nxdpp.pipeline.cost.balanced_partition import CostPolicy
from nxdpp.pipeline.cost.count import NodeCost, count_costs
from nxdpp.pipeline.cost.layer_costs import StateBytes, activation_bytes, state_bytes
from nxdpp.pipeline.cost.transport_bytes import transport_bytes
from nxdpp.pipeline.partition.partition import GivenCuts, PartitionPolicy, even, make_partition
from nxdpp.pipeline.planning.dimensions import Dimensions, StepTraffic, step_traffic
from nxdpp.pipeline.stages.cut_graph import CutGraph
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.in_flight import in_flight
from nxdpp.tracing import listings
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.trace import TracingOptions, trace_for

_CPU = torch.device("cpu")
_ALONE = Dimensions()


@dataclass(frozen=True)
class StageSummary:
    """Cost of one stage, on each of the ranks that share it.

    Attributes:
        layers: names of its transformer layers.
        state: bytes of its parameters, gradients and optimizer state.
        forward, backward: FLOPs of one microbatch.
        work: forward and backward of one microbatch, as in ``NodeCost``.
        peak_activations: bytes of all microbatches in flight, under 1F1B or, with several stages a rank, interleaved
            1F1B.
        sent_tensors, sent_bytes: boundary tensors that the forward of one microbatch sends to other stages.
        traffic: bytes that each of its ranks sends in a step beside those of the pipeline.
        transport: bytes of communicators and messages on its rank, a part of the rank's memory limit.
        estimated: True if some costs are estimated.
    """

    layers: list[str]
    state: StateBytes
    forward: float
    backward: float
    work: float
    peak_activations: int
    sent_tensors: int
    sent_bytes: int
    traffic: StepTraffic
    transport: int
    estimated: bool

    @property
    def memory(self) -> int:
        """Bytes of its parameters, gradients, optimizer state and activations."""
        return self.state.total + self.peak_activations


def summarise_stages(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    ranks: int,
    microbatches: int,
    balanced: bool = False,
    memory_limit: int | None = None,
    chunks: int = 1,
    device: torch.device = _CPU,
    sizes: Dimensions = _ALONE,
) -> list[StageSummary]:
    """Return a summary of each stage of ``model``.

    Args:
        model: the model. It is not changed. It may be on the meta device. With a tensor-parallel size it is divided.
        inputs: one microbatch with labels. It may be on the meta device.
        ranks: number of ranks of the pipeline.
        microbatches: number of microbatches of a step.
        balanced: balance the work of the stages. By default layers are split evenly.
        memory_limit: bytes of a rank, for balanced cuts only.
        chunks: number of stages of each rank, the virtual pipeline size. Stage ``s`` is on rank ``s % ranks``.
        device: device of the stages. Communicators and messages take memory on CUDA alone.
        sizes: of the other dimensions. Replicas and tensor groups take a communicator.

    Raises:
        ValueError: for too many stages, or if no cut fits into the memory.
        TracingError: for a model that cannot be traced.
    """
    if memory_limit is not None and not balanced:
        raise ValueError("a memory limit needs balanced cuts: add --partition balanced, or leave the limit out.")
    options = TracingOptions(find_layer_classes(model, None))
    traced = trace_for(model, inputs, options)
    node_costs = count_costs(traced, model, inputs)
    schedule = ChosenSchedule(None, ranks, microbatches, chunks)
    by_cost = CostPolicy(model, inputs, "balanced", schedule, memory_limit, sizes.zero1)
    policy: PartitionPolicy = even
    if balanced:
        policy = GivenCuts(by_cost.cuts(traced, node_costs, device, sizes.data, sizes.tensor))
    layers = layer_names(model, options.layer_classes)
    cut = CutGraph(traced, make_partition(traced, model, layers, schedule.placement.stages, policy))
    transport = transport_bytes(traced, node_costs, device, ranks, sizes.data, sizes.tensor)
    return _summaries(cut, node_costs, in_flight(schedule.training), transport, microbatches, sizes)


def _summaries(
    cut: CutGraph,
    node_costs: Mapping[fx.Node, NodeCost],
    peaks: Sequence[int],
    transport: int,
    microbatches: int,
    sizes: Dimensions,
) -> list[StageSummary]:
    parameters = dict(listings.named_parameters(cut.partition.module, remove_duplicate=False))
    by_name = {node.name: node for node in cut.traced.graph.nodes}
    found = []
    for plan in cut.plans([cut.loss()]):
        nodes = [node for node, stage in cut.assigned.items() if stage == plan.stage]
        sent = [node_costs[by_name[name]] for name, stages in plan.sent.items() for _ in stages]
        owned = cut.partition.parameters_of(plan.stage)
        held = [parameters[name] for name in owned if name in parameters]
        state = state_bytes(held, sizes.sharded_over)
        in_tensor_group = microbatches * sum(node_costs[node].tensor_bytes for node in nodes)
        found.append(
            StageSummary(
                layers=cut.partition.layers_of([plan.stage]),
                state=state,
                forward=sum(node_costs[node].forward for node in nodes),
                backward=sum(node_costs[node].backward for node in nodes),
                work=sum(node_costs[node].work for node in nodes),
                peak_activations=peaks[plan.stage] * activation_bytes(nodes, node_costs, cut.traced),
                sent_tensors=sum(cost.output_tensors for cost in sent),
                sent_bytes=sum(cost.output_bytes for cost in sent),
                traffic=step_traffic(in_tensor_group, held, state, sizes),
                transport=transport,
                estimated=any(node_costs[node].estimated for node in nodes),
            )
        )
    return found
