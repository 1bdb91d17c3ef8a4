"""What each stage of a pipeline will compute, hold and send, before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from nxdpp.pipeline.cost.balanced_partition import balance
from nxdpp.pipeline.cost.count import NodeCost, count_costs
from nxdpp.pipeline.cost.layer_costs import StateBytes, activation_bytes, state_bytes
from nxdpp.pipeline.partition.partition import even, make_partition
from nxdpp.pipeline.stages.cut_graph import CutGraph
from nxdpp.schedules.in_flight import microbatches_in_flight
from nxdpp.schedules.placement import Placement
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.trace import TracedGraph, TracingOptions, trace_for

PARTITIONS = ("even", "balanced")


@dataclass(frozen=True)
class StageSummary:
    """One stage; FLOPs and bytes that cross are of one microbatch.

    ``work`` is forward and backward as ``NodeCost`` has it; ``peak_activations`` are bytes of all microbatches in
    flight under 1F1B, interleaved where ranks have several stages; ``sent_tensors`` and ``sent_bytes`` what its
    forward sends, to whichever stages; ``estimated`` says that some costs are not counted.
    """

    layers: list[str]
    state: StateBytes
    forward: float
    backward: float
    work: float
    peak_activations: int
    sent_tensors: int
    sent_bytes: int
    estimated: bool


def summarise_stages(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    stages: int,
    microbatches: int,
    partition: str = "even",
    memory_limit: int | None = None,
    chunks: int = 1,
) -> list[StageSummary]:
    """The stages of ``model`` for microbatches like ``inputs``.

    Args:
        model: may be on the meta device; it is as before afterwards.
        inputs: one microbatch, with what the loss needs; may be on the meta device.
        stages: ranks of the pipeline, each with one stage or, with several chunks, that many.
        microbatches: how many a step has.
        partition: ``"even"`` or ``"balanced"``.
        memory_limit: bytes of a rank; with ``"balanced"`` only.
        chunks: stages of each rank, the virtual pipeline size; stage ``s`` is on rank ``s % stages``.

    Raises:
        ValueError: for an argument that cannot be honoured, too many stages, or where no cut fits.
        TracingError: for a model that cannot be traced.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"partition={partition!r} must be one of {', '.join(map(repr, PARTITIONS))}.")
    if memory_limit is not None and partition != "balanced":
        raise ValueError("a memory limit moves cuts only where they are balanced: add --partition balanced.")
    options = TracingOptions(find_layer_classes(model, None))
    traced = trace_for(model, inputs, options)
    costs = count_costs(traced, model, inputs)
    placement = Placement(stages, chunks)
    in_flight = microbatches_in_flight(stages, microbatches, chunks)

    def balanced(traced: TracedGraph, stages: int) -> list[str]:
        return balance(traced, model, costs, placement, memory_limit, in_flight)

    policy = balanced if partition == "balanced" else even
    layers = layer_names(model, options.layer_classes)
    cut = CutGraph(traced, make_partition(traced, model, layers, placement.stages, policy))
    return _summaries(cut, costs, in_flight)


def _summaries(cut: CutGraph, costs: Mapping[fx.Node, NodeCost], in_flight: Sequence[int]) -> list[StageSummary]:
    parameters = dict(cut.partition.module.named_parameters(remove_duplicate=False))
    by_name = {node.name: node for node in cut.traced.graph.nodes}
    found = []
    for plan in cut.plans([cut.loss()]):
        nodes = [node for node, stage in cut.assigned.items() if stage == plan.stage]
        sent = [costs[by_name[name]] for name, stages in plan.sent.items() for _ in stages]
        owned = cut.partition.parameters_of(plan.stage)
        found.append(
            StageSummary(
                layers=cut.partition.layers_of([plan.stage]),
                state=state_bytes(parameters[name] for name in owned if name in parameters),
                forward=sum(costs[node].forward for node in nodes),
                backward=sum(costs[node].backward for node in nodes),
                work=sum(costs[node].work for node in nodes),
                peak_activations=in_flight[plan.stage] * activation_bytes(nodes, costs, cut.traced),
                sent_tensors=sum(cost.output_tensors for cost in sent),
                sent_bytes=sum(cost.output_bytes for cost in sent),
                estimated=any(costs[node].estimated for node in nodes),
            )
        )
    return found
