"""All stages of a pipeline in one process, one microbatch after the other: slow, and exactly the same numbers."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline import arguments
from nxdpp.pipeline.engine import Engine
from nxdpp.pipeline.example_shapes import example_shapes
from nxdpp.pipeline.fingerprint import fingerprint
from nxdpp.pipeline.layout import TensorLayout
from nxdpp.pipeline.microbatch import split_inputs
from nxdpp.pipeline.partition import even_cuts, stages_of_layers
from nxdpp.pipeline.placement import layers_in_order
from nxdpp.pipeline.program import StageProgram
from nxdpp.pipeline.programs import ProgramCache, TracedVariant, Variant
from nxdpp.pipeline.split import StagePlan, build_stage
from nxdpp.pipeline.step_timer import StepTimer
from nxdpp.pipeline.transport import Direction
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.trace import TracingOptions

_NO_FINGERPRINT = fingerprint([])  # there are no other ranks
_CPU = torch.device("cpu")
_FORWARD = (ActionKind.RECEIVE_ACTIVATION, ActionKind.FORWARD, ActionKind.SEND_ACTIVATION)
_BACKWARD = (ActionKind.RECEIVE_GRADIENT, ActionKind.BACKWARD, ActionKind.SEND_GRADIENT)


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
        self._cache = ProgramCache(module, options, None, 0, {})
        kinds = arguments.first_inputs(module, input_names)
        first = self._cache.trace(
            Variant(tuple(sorted(kinds.items())), (), module.training), example_shapes(module, kinds)
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
        messages: dict[Any, deque[Any]] = {}
        engines = []
        for plan in plans:
            stage = build_stage(plan, variant.traced, self._module, variant.placed)
            program = StageProgram(plan, stage, frozenset(), _NO_FINGERPRINT)
            transport: Any = _Loopback(plan.stage, messages)
            engines.append(Engine(program, None, transport, parts, _CPU, backward, True, StepTimer(_CPU), None))
        for microbatch in range(microbatches):
            for engine, plan in zip(engines, plans, strict=True):
                engine.run(_actions(plan, microbatch, _FORWARD, plan.received, plan.sent))
            for engine, plan in reversed(list(zip(engines, plans, strict=True)) if backward else []):
                engine.run(_actions(plan, microbatch, _BACKWARD, plan.sent, plan.received))
        return [result[0] for result in engines[-1].results]


def _actions(
    plan: StagePlan, microbatch: int, kinds: tuple[ActionKind, ...], taken: object, given: object
) -> list[Action]:
    wanted = zip(kinds, (taken, True, given), strict=True)
    return [Action(plan.stage, kind, microbatch) for kind, there in wanted if there]


class _Loopback:
    """A transport whose messages stay in this process."""

    def __init__(self, stage: int, messages: dict[Any, deque[Any]]) -> None:
        self._stage = stage
        self._messages = messages

    def send(self, tensor: torch.Tensor, destination: int, direction: Direction, tag: int, queue: int = 0) -> None:
        """Keep a copy for the destination."""
        self._put(destination, (direction, tag), tensor.detach().clone(memory_format=torch.preserve_format))

    def post_receive(
        self, layout: TensorLayout, source: int, direction: Direction, tag: int
    ) -> Callable[[], torch.Tensor]:
        """A function that takes what was sent."""
        return lambda: self._take(source, (direction, tag))

    def send_object(self, value: Any, destination: int, tag: int) -> None:
        """Keep the object for the destination."""
        self._put(destination, ("description", tag), value)

    def receive_object(self, source: int, tag: int) -> Any:
        """What ``send_object`` kept."""
        return self._take(source, ("description", tag))

    def finish_sends(self) -> None:
        """Nothing is ever under way."""

    def _put(self, destination: int, what: Any, value: Any) -> None:
        self._messages.setdefault((self._stage, destination, what), deque()).append(value)

    def _take(self, source: int, what: Any) -> Any:
        return self._messages[source, self._stage, what].popleft()
