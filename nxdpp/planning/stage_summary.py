"""Work, memory and sent tensors of each stage of a pipeline, before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from nxdpp.devices import CUDA
from nxdpp.devices.roofline import machine_balance
from nxdpp.pipeline.partition.balanced_partition import CostPolicy
from nxdpp.pipeline.partition.layer_costs import StateBytes, activation_bytes
from nxdpp.pipeline.partition.partition import GivenCuts, PartitionPolicy, even, make_partition
from nxdpp.pipeline.partition.transport_bytes import transport_bytes
from nxdpp.pipeline.stages.cut_graph import CutGraph
from nxdpp.planning.dimensions import StepTraffic, WholeBytes, planned_state, step_traffic
from nxdpp.planning.dtypes import dtype_of
from nxdpp.planning.layer_times import weight_bytes
from nxdpp.planning.layout import Dimensions
from nxdpp.planning.step_times import split_share
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.memory import in_flight
from nxdpp.tracing.costs.count import NodeCost, count_costs
from nxdpp.tracing.costs.node_parts import CountedParts
from nxdpp.tracing.graph.trace import TracingOptions, trace_for
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.layers import find_layer_classes, layer_names

_CPU = torch.device("cpu")
_ALONE = Dimensions()


@dataclass(frozen=True)
class StageSummary:
    """Cost of one stage, on each of the ranks that share it.

    Attributes:
        rank: its rank of the pipeline.
        layers: names of its transformer layers.
        state: bytes of its parameters, gradients and optimizer state.
        forward, backward: FLOPs of one microbatch.
        work: forward and backward of one microbatch, as in ``NodeCost``.
        in_flight: the most microbatches between their forward and the end of their backward.
        activations: bytes of one microbatch that it holds from the forward to the backward or input-gradient.
        kept: bytes from the input-gradient to the weight-gradient, where the schedule splits the backward.
        sent_tensors, sent_bytes: boundary tensors that the forward of one microbatch sends to other stages.
        traffic: bytes that each of its ranks sends in a step outside of the pipeline.
        transport: bytes of communicators and messages on its rank, a part of the rank's memory limit.
        estimated: True if some costs are estimated.
        parameters: its parameters.
        at_once: what is whole at once with ZeRO-3.
    """

    rank: int
    layers: list[str]
    state: StateBytes
    forward: float
    backward: float
    work: float
    in_flight: int
    activations: int
    kept: int
    sent_tensors: int
    sent_bytes: int
    traffic: StepTraffic
    transport: int
    estimated: bool
    parameters: Sequence[nn.Parameter] = field(repr=False, compare=False)
    at_once: WholeBytes = field(default_factory=WholeBytes)

    @property
    def peak_activations(self) -> int:
        """Bytes of all its microbatches in flight, at most."""
        return self.in_flight * self.activations

    @property
    def memory(self) -> int:
        """Bytes of its parameters, gradients, optimizer state and activations."""
        return self.state.total + self.peak_activations


def summarise_stages(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    schedule: ChosenSchedule,
    balanced: bool = False,
    memory_limit: int | None = None,
    device: torch.device = _CPU,
    sizes: Dimensions = _ALONE,
) -> list[StageSummary]:
    """Return a summary of each stage of ``model``.

    Args:
        model: the model. It is not changed. It may be on the meta device. With a tensor-parallel size it is divided.
        inputs: one microbatch with labels. It may be on the meta device.
        schedule: the schedule, with the numbers of ranks, microbatches and stages.
        balanced: balance the work of the stages. By default layers are split evenly.
        memory_limit: bytes of a rank, for balanced cuts only.
        device: device of the stages. Communicators and messages take memory only on CUDA.
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
    by_cost = CostPolicy(model, inputs, "balanced", schedule, memory_limit, sizes.zero > 0)
    policy: PartitionPolicy = even
    if balanced:
        policy = GivenCuts(by_cost.cuts(traced, node_costs, device, sizes.data, sizes.tensor))
    layers = layer_names(model, options.layer_classes)
    cut = CutGraph(traced, make_partition(traced, model, layers, schedule.placement.stages, policy))
    transport = transport_bytes(traced, node_costs, device, schedule.ranks, sizes.data, sizes.tensor)
    parts = None
    if any(action.kind is ActionKind.INPUT_GRADIENT for actions in schedule.training for action in actions):
        balance = machine_balance(torch.device(CUDA), dtype_of(model))
        parts = count_costs(traced, model, inputs, parts=CountedParts(balance))
    return _summaries(cut, node_costs, parts, schedule, transport, sizes)


def _summaries(
    cut: CutGraph,
    node_costs: Mapping[fx.Node, NodeCost],
    with_parts: Mapping[fx.Node, NodeCost] | None,
    schedule: ChosenSchedule,
    transport: int,
    sizes: Dimensions,
) -> list[StageSummary]:
    parameters = dict(listings.named_parameters(cut.partition.module, remove_duplicate=False))
    by_name = {node.name: node for node in cut.traced.graph.nodes}
    nodes_of: dict[int, list[fx.Node]] = {}
    for node, stage in cut.assigned.items():
        nodes_of.setdefault(stage, []).append(node)
    peaks, share = in_flight(schedule.training), split_share(schedule.training)
    found = []
    for plan in cut.plans([cut.loss()]):
        nodes = nodes_of.get(plan.stage, [])
        sent = [node_costs[by_name[name]] for name, stages in plan.sent.items() for _ in stages]
        owned = cut.partition.parameters_of(plan.stage)
        held = [parameters[name] for name in owned if name in parameters]
        layers = cut.partition.layers_of([plan.stage])
        unit, rest = _units({name: parameters[name] for name in owned if name in parameters}, layers)
        at_once = WholeBytes.of(held, unit, rest, with_parts is not None)
        in_tensor_group = schedule.microbatches * sum(node_costs[node].tensor_bytes for node in nodes)
        activations = activation_bytes(nodes, node_costs, cut.traced)
        found.append(
            StageSummary(
                rank=schedule.placement.rank_of(plan.stage),
                layers=layers,
                state=planned_state(held, at_once, sizes),
                forward=sum(node_costs[node].forward for node in nodes),
                backward=sum(node_costs[node].backward for node in nodes),
                work=sum(node_costs[node].work for node in nodes),
                in_flight=peaks[plan.stage],
                activations=activations,
                kept=_kept(plan.stage, nodes, activations, with_parts),
                sent_tensors=sum(cost.output_tensors for cost in sent),
                sent_bytes=sum(cost.output_bytes for cost in sent),
                traffic=step_traffic(in_tensor_group, held, sizes, schedule.microbatches, share),
                transport=transport,
                estimated=any(node_costs[node].estimated for node in nodes),
                parameters=held,
                at_once=at_once,
            )
        )
    return found


def _units(parameters: Mapping[str, nn.Parameter], layers: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of the parameters of the largest of ``layers``, and of all parameters of none of them."""
    units: dict[str, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), "")
        units.setdefault(layer, []).append(parameter)
    rest = weight_bytes(units.pop("", []))
    return max((weight_bytes(unit) for unit in units.values()), default=0), rest


def _kept(stage: int, nodes: Sequence[fx.Node], activations: int, with_parts: Mapping[fx.Node, NodeCost] | None) -> int:
    """Return the bytes of a microbatch between input- and weight-gradient; the first stage has no input-gradient."""
    if with_parts is None or stage == 0:
        return activations
    found = [with_parts[node].parts for node in nodes]
    return sum(part.kept for part in found if part is not None)
