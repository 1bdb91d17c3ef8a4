"""All stages of a pipeline in one process, run by hand or by the engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.agreement.step_signature import forms_of
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.local.changes import ChangeRecord
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.microbatches.split_batch import split_batch
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.partition.partition import PartitionPolicy, even, make_partition
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.metadata_exchange import metadata_placeholder
from nxdpp.pipeline.runtime.stage_channels import EngineConfig
from nxdpp.pipeline.stages.cut_graph import CutGraph, fill_output
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.placement import Placement
from nxdpp.tracing.graph.trace import TracingOptions, trace_for
from nxdpp.tracing.modules.layers import find_layer_classes

_CPU = torch.device("cpu")


class InProcessPipeline:
    """``module`` cut into stages that all run in this process. Stages share tied parameters.

    Args:
        module: the model.
        stages: number of stages.
        inputs: of one microbatch, for the first trace; by default the example inputs of ``Pipeline``.
        options: for tracing; by default from ``transformer_layer_cls``.
        transformer_layer_cls, input_names: as those of ``NxDPPModel``.
        policy: chooses the cuts; by default even ones.

    Attributes:
        partition: of the model.
        cut: the trace for ``inputs``, cut; missing without ``inputs``.
        plans, modules: of each stage of ``cut``. The last stage ends with all values of the output.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: int,
        inputs: Mapping[str, Any] | None = None,
        options: TracingOptions | None = None,
        transformer_layer_cls: Any | None = None,
        input_names: Sequence[str] | None = None,
        policy: PartitionPolicy | None = None,
    ) -> None:
        self._module = module
        options = options or TracingOptions(find_layer_classes(module, transformer_layer_cls))
        if inputs is None:
            self.partition = first_partition(module, options, stages, policy or even, input_names)
        else:
            traced = trace_for(module, inputs, options)
            self.partition = make_partition(traced, module, options.layers_of(module), stages, policy)
            self.cut = CutGraph(traced, self.partition)
        self.programs = ProgramCache(self.partition, options, None, range(stages), {}, ChangeRecord())

    @property
    def plans(self) -> list[StagePlan]:
        return self.cut.plans(self.cut.results())

    @property
    def modules(self) -> list[fx.GraphModule]:
        return [self.cut.build(plan) for plan in self.plans]

    @property
    def boundary_tensors(self) -> list[tuple[str, int, int]]:
        """Boundary tensors as (value, source stage, destination stage)."""
        return [
            (value, plan.stage, destination)
            for plan in self.plans
            for value, destinations in plan.sent.items()
            for destination in destinations
        ]

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run the stages by hand. Each stage gets only copies of the values that it receives."""
        made: list[dict[str, Any]] = []
        for plan, module in zip(self.plans, self.modules, strict=True):
            given, received, placeholders = stage_arguments(plan, inputs, made, torch.clone)
            made.append(dict(zip(plan.made, module(*given, *received, *placeholders), strict=True)))
        return fill_output(self.cut.output, made[-1])

    def train(
        self, inputs: Mapping[str, Any], microbatches: int, backward: bool = True, in_flight: bool = False
    ) -> list[torch.Tensor]:
        """Run the forward and, by default, the backward of all microbatches on the engine; return the losses.

        With ``in_flight`` each stage runs the forward of all microbatches before the next stage begins.
        """
        parts, _ = split_batch(self._module, inputs, microbatches, None, _CPU, batch_dimension=0)
        graphs = self.programs.graphs_of(parts)
        program, forms = self.programs.program_of(graphs, "loss"), forms_of(parts, graphs.numbers)
        stages = self.partition.stages
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)[: 1 + backward]
        order = {ActionKind.FORWARD: range(stages), ActionKind.BACKWARD: range(stages - 1, -1, -1)}
        actions = [
            Action(stage, kind, microbatch)
            for microbatch in range(microbatches)
            for kind in kinds
            for stage in order[kind]
        ]
        if in_flight:
            actions.sort(key=lambda action: (kinds.index(action.kind), order[action.kind].index(action.stage)))
        config = EngineConfig(
            Placement(1, stages),
            0,
            microbatches,
            _CPU,
            backward,
            keep_outputs=True,
            forms=forms.numbers,
            graphs=forms.graphs,
        )
        engine = Engine(config, [each.stages for each in program.graphs or (program,)], None, actions)
        return [result[0] for result in engine.run(StepLoss(parts))]

    def loss_plans(self, inputs: Mapping[str, Any]) -> tuple[CutGraph, list[StagePlan]]:
        """Return the graph for a microbatch like ``inputs``, and the plans of the stages that end with its loss."""
        cut = self.programs.cut_graph(inputs, self._module.training)
        return cut, [stage.plan for stage in self.programs.program(cut, "loss").stages.values()]


def stage_arguments(
    plan: StagePlan,
    inputs: Mapping[str, Any],
    made: Sequence[Mapping[str, Any]],
    copy: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the inputs, received values and placeholders of one stage; ``made`` are the values of earlier stages."""
    device = next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
    received = [pytree.tree_map_only(torch.Tensor, copy, made[stage][name]) for name, stage in plan.received.items()]
    placeholders = [
        metadata_placeholder(layout_of(made[stage][name]), device) for name, stage in plan.received_metadata.items()
    ]
    return [inputs[name] for name in plan.inputs], received, placeholders
