"""All stages of a model in one process, each fed by hand with what the earlier ones made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.partition.assignment import Owners, parameter_owners, place_nodes
from nxdpp.pipeline.partition.cuts import even_cuts, stages_of_layers
from nxdpp.pipeline.runtime.stand_in import stand_in
from nxdpp.pipeline.stages.split import StagePlan, build_stage, plan_stages
from nxdpp.tracing.layers import layer_names
from nxdpp.tracing.trace import TracedGraph, TracingOptions
from tests.support.traced_models import options_for, trace_with


class ChainedStages:
    """A model cut into even stages that end with all its outputs."""

    traced: TracedGraph
    plans: list[StagePlan]
    modules: list[fx.GraphModule]
    owners: Owners

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], stages: int, options: TracingOptions | None = None
    ) -> None:
        options = options or options_for(model)
        layers = layer_names(model, options.layer_classes)
        self.layer_stages = stages_of_layers(even_cuts(layers, stages), layers)
        self.traced = trace_with(model, inputs, options)
        self.placed = place_nodes(self.traced, model, self.layer_stages)
        self.owners = parameter_owners(self.placed, model)
        (self._values,) = next(node.args for node in self.traced.graph.nodes if node.op == "output")
        results = list(dict.fromkeys(value for value in self._values if isinstance(value, fx.Node)))
        self.plans = plan_stages(self.traced, model, self.placed, results, stages)
        self.modules = [build_stage(plan, self.traced, model, self.placed) for plan in self.plans]

    @property
    def crossing(self) -> list[tuple[str, int, int]]:
        """Each value that is sent, with its maker and its user."""
        return [
            (value, plan.stage, user) for plan in self.plans for value, users in plan.sent.items() for user in users
        ]

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """The model's output; a stage is given copies of what it receives, and nothing else of another stage."""
        made: list[dict[str, Any]] = []
        for plan, module in zip(self.plans, self.modules, strict=True):
            received = [
                pytree.tree_map_only(torch.Tensor, torch.clone, made[maker][name])
                for name, maker in plan.received.items()
            ]
            stand_ins = [
                stand_in(layout_of(made[maker][name]), _device(inputs)) for name, maker in plan.stand_ins.items()
            ]
            values = module(*(inputs[name] for name in plan.inputs), *received, *stand_ins)
            made.append(dict(zip(plan.made, values, strict=True)))
        leaves = [made[-1][value.name] if isinstance(value, fx.Node) else value for value in self._values]
        return pytree.tree_unflatten(leaves, self.traced.output_spec)


def _device(inputs: Mapping[str, Any]) -> torch.device:
    return next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
