"""All stages of a pipeline in one process, one microbatch after the other: slow, and exactly the same numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline import arguments
from nxdpp.pipeline.example_inputs import example_shapes
from nxdpp.pipeline.microbatch import split_inputs
from nxdpp.pipeline.partition.assignment import layers_in_order
from nxdpp.pipeline.partition.cuts import even_cuts, stages_of_layers
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.stages.program import StageProgram
from nxdpp.pipeline.stages.program_cache import ProgramCache, TracedVariant, Variant
from nxdpp.pipeline.stages.split import StagePlan, build_stage
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.placement import Placement
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.trace import TracingOptions

_CPU = torch.device("cpu")


class LocalPipeline:
    """``module`` cut into ``stages``, all of them here; parameters that stages share stay one.

    ``transformer_layer_cls`` and ``input_names`` are those of ``NxDPPModel``.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: int,
        transformer_layer_cls: Any | None = None,
        input_names: Sequence[str] | None = None,
    ) -> None:
        self.stages = stages
        self._module = module
        options = TracingOptions(find_layer_classes(module, transformer_layer_cls))
        self._cache = ProgramCache(module, options, None, [], {})
        specs = arguments.first_inputs(module, input_names)
        first = self._cache.trace(
            Variant(tuple(sorted(specs.items())), (), module.training), example_shapes(module, specs)
        )
        layers = layers_in_order(first, layer_names(module, options.layer_classes))
        self._cache.place(first, stages_of_layers(even_cuts(layers, stages), layers))

    def plans(self, inputs: Mapping[str, Any]) -> tuple[TracedVariant, list[StagePlan]]:
        """The graph for a microbatch like this, and the plan of each stage."""
        variant = self._cache.for_inputs(inputs, self._module.training)
        self._cache.loss_program(variant)
        return variant, variant.plans["loss"]

    def train(self, inputs: Mapping[str, Any], microbatches: int, backward: bool = True) -> list[torch.Tensor]:
        """Forward of all microbatches, and ``backward``; the losses. Gradients are added to ``.grad``."""
        parts = split_inputs(inputs, microbatches)
        variant, plans = self.plans(parts[0])
        engine = self._engine(variant, plans, microbatches, backward)
        return [result[0] for result in engine.run(parts)]

    def _engine(self, variant: TracedVariant, plans: list[StagePlan], microbatches: int, backward: bool) -> Engine:
        programs = {
            plan.stage: StageProgram(plan, build_stage(plan, variant.traced, self._module, variant.placed))
            for plan in plans
        }
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)[: 1 + backward]
        order = {ActionKind.FORWARD: range(self.stages), ActionKind.BACKWARD: range(self.stages - 1, -1, -1)}
        actions = [
            Action(stage, kind, microbatch)
            for microbatch in range(microbatches)
            for kind in kinds
            for stage in order[kind]
        ]
        placement = Placement(1, self.stages)
        return Engine(programs, placement, 0, None, microbatches, _CPU, backward, True, actions, [], None)
