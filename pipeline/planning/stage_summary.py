"""What each stage of a pipeline will compute, hold and send, before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.pipeline.cost.count import NodeCost, count_costs
from nxdpp.pipeline.cost.layer_costs import StateBytes, activation_bytes, layer_costs, shared_bytes, state_bytes
from nxdpp.pipeline.partition.assignment import layers_in_order, parameter_owners, place_nodes
from nxdpp.pipeline.partition.balance import MemoryLimit, balanced_cuts
from nxdpp.pipeline.partition.cuts import even_cuts, stages_of_layers
from nxdpp.pipeline.stages.loss import pick_loss
from nxdpp.pipeline.stages.split import plan_stages
from nxdpp.schedules.in_flight import microbatches_in_flight
from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.sizes import shapes_of
from nxdpp.tracing.trace import TracedGraph, TracingOptions, trace

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
    traced = trace(
        model, {name: InputSpec(v.ndim, v.dtype) for name, v in inputs.items()}, {}, options, shapes_of(inputs)
    )
    layers = layers_in_order(traced, layer_names(model, options.layer_classes))
    cuts = even_cuts(layers, stages * chunks)
    in_flight = microbatches_in_flight(stages, microbatches, chunks)
    costs = count_costs(traced, model, inputs)
    if partition == "balanced":
        memory = None
        if memory_limit is not None:
            shared = shared_bytes(traced, model, costs, layers)
            memory = MemoryLimit(memory_limit, in_flight, shared)
        cuts = balanced_cuts(layer_costs(traced, model, costs, layers), stages, chunks, memory)
    return _summaries(traced, model, costs, stages_of_layers(cuts, layers), in_flight)


def _summaries(
    traced: TracedGraph,
    model: nn.Module,
    costs: Mapping[fx.Node, NodeCost],
    layer_stages: Mapping[str, int],
    in_flight: Sequence[int],
) -> list[StageSummary]:
    placed = place_nodes(traced, model, layer_stages, number=len(in_flight))
    owners = parameter_owners(placed, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_name = {node.name: node for node in traced.graph.nodes}
    found = []
    for plan in plan_stages(traced, model, placed, [_loss(traced)], len(in_flight)):
        nodes = [node for node, stage in placed.items() if stage == plan.stage]
        sent = [costs[by_name[name]] for name, users in plan.sent.items() for _ in users]
        found.append(
            StageSummary(
                layers=[layer for layer, stage in layer_stages.items() if stage == plan.stage],
                state=state_bytes(parameters[name] for name, stages in owners.items() if plan.stage in stages),
                forward=sum(costs[node].forward for node in nodes),
                backward=sum(costs[node].backward for node in nodes),
                work=sum(costs[node].work for node in nodes),
                peak_activations=in_flight[plan.stage] * activation_bytes(nodes, costs, traced),
                sent_tensors=sum(cost.output_tensors for cost in sent),
                sent_bytes=sum(cost.output_bytes for cost in sent),
                estimated=any(costs[node].estimated for node in nodes),
            )
        )
    return found


def _loss(traced: TracedGraph) -> fx.Node:
    values: Any = next(node.args[0] for node in traced.graph.nodes if node.op == "output")
    loss = pick_loss(pytree.tree_unflatten(list(values), traced.output_spec), None)
    if not isinstance(loss, fx.Node):
        raise ValueError(f"the model's loss is the constant {loss!r}; there is nothing to train.")
    return loss
