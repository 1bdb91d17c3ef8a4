"""One stage of a rank: its part in each action of a schedule.

One microbatch passes through a stage in these actions::

    FORWARD             take activations (B, T, H) of source stages; run the stage's graph; keep the backward's roots
    SEND_ACTIVATION     start to send activations (B, T, H) to destination stages
    BACKWARD            take their gradients (B, T, H); run autograd from the roots; free the microbatch
    INPUT_GRADIENT      take their gradients; compute the gradients of the received activations
    WEIGHT_GRADIENT     compute the gradients of the parameters; free the microbatch
    SEND_GRADIENT       start to send the gradients (B, T, H) of received activations to source stages
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from nxdpp.devices.kinds import has_own_memory
from nxdpp.devices.strides import copied
from nxdpp.pipeline.backward.graph import BackwardAnalysis
from nxdpp.pipeline.backward.run import ReceivedTensor, edge_of, run_backward
from nxdpp.pipeline.backward.split import SplitBackward
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.p2p.channel import Channel, LocalChannel
from nxdpp.pipeline.p2p.layout import BoundaryTensor, ValueLayout, check_layout, tensors_of
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.pipeline.runtime.metadata_exchange import Incoming, MetadataExchange
from nxdpp.pipeline.runtime.module_memory import copy_values, names_in_module_memory
from nxdpp.pipeline.runtime.stage_channels import EngineConfig
from nxdpp.pipeline.stages.cut_graph import StageProgram
from nxdpp.pipeline.stages.in_place_guard import expect_unchanged, versions
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.schedules.actions import ActionKind

_NO_STEP = StepLoss(())
_gradient_of = attrgetter("gradient")


@dataclass(slots=True)
class _InFlight:
    """A microbatch between its forward and its backward.

    Received tensors enter the autograd graph at ``entries``, and its backward starts at ``roots``. Neither keeps an
    activation alive. ``kept`` are nodes that keep the nodes of ``entries``, which are Python's, alive.
    """

    received: list[ReceivedTensor]
    entries: list[GradientEdge] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    roots: dict[tuple[str, int], GradientEdge] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    has_items: bool = True
    outputs: Any = None
    split: SplitBackward | None = None


class StageRunner:
    """One stage for inputs of one signature, step after step.

    Args:
        program: the stage.
        channels_in: the channels to source stages, by their number.
        channels_out: the channels to destination stages, by their number.
        config: settings of the steps. In training the stage's first result is the loss.
        splits: ``True`` if input-gradients and weight-gradients are computed apart.
        timer: measures the time in which the stage computes.

    Attributes:
        module: what runs in the next forward: the program's first run, then its module.
    """

    def __init__(
        self,
        program: StageProgram,
        channels_in: Sequence[Channel],
        channels_out: Sequence[Channel],
        config: EngineConfig,
        splits: bool,
        timer: StepTimer,
    ) -> None:
        self.results: dict[int, list[Any]] = {}
        self.program = program
        self.module = program.first_run or program.module
        self._plan = program.plan
        self._names = program.plan.made
        self._not_sent = [name for name in program.plan.made if name not in program.plan.sent]
        self._channels_in = channels_in
        self._channels_out = channels_out
        # The schedule has no send for tensors that stay on this rank, and none for metadata.
        self._local_out = [channel for channel in channels_out if isinstance(channel, LocalChannel)]
        self._local_in = [channel for channel in channels_in if isinstance(channel, LocalChannel)]
        self._sends_activations = any(c.boundary.values for c in channels_out if c not in self._local_out)
        self._sends_gradients = any(c.boundary.values for c in channels_in if c not in self._local_in)
        self._train = config.train
        self._device = config.device
        self._keep_outputs = config.keep_outputs
        self._splits = splits
        self._blocks, self._stamp = timer.blocks, timer.stamp
        self._loss_gradient = config.loss_gradient
        self._metadata = MetadataExchange(program.plan, channels_in, channels_out, config.device)
        self._in_module_memory: list[str] | None = None
        self._incoming: list[Incoming] = []
        # Of each sent value, known after the metadata exchange.
        self._layouts: dict[str, ValueLayout] = {}
        self._analysis = BackwardAnalysis()
        self._loss = _NO_STEP
        self._made: dict[int, dict[str, Any]] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._gradients: dict[int, dict[int, list[torch.Tensor | None]]] = {}

    def begin(self, loss: StepLoss) -> None:
        """Begin a step with the model's inputs of each microbatch, and their part in its ``loss``."""
        self._loss = loss

    def end(self) -> None:
        """End the step: free all that belongs to it."""
        self._loss = _NO_STEP
        self.results = {}
        for state in (self._made, self._in_flight, self._gradients):
            state.clear()

    def forward(self, microbatch: int) -> None:
        """Run the stage on received activations (B, T, H) and the model's inputs."""
        # Receive.
        in_flight, plan = _InFlight([]), self._plan
        received = self._receive(microbatch, in_flight)
        arguments = [
            *map(self._loss.microbatches[microbatch].__getitem__, plan.inputs),
            *map(received.__getitem__, plan.received),
            *map(self._metadata.placeholders.__getitem__, plan.received_metadata),
        ]
        sharing = self._metadata.sharing_memory
        guarded = [(name, received[name], versions(received[name])) for name in sharing] if sharing else ()
        # Forward. Not through ``__call__``: the graph has no hooks, and the wrappers take time.
        start = self._stamp()
        values = self.module.forward(*arguments)
        self._blocks.append((plan.stage, ActionKind.FORWARD, microbatch, start, self._stamp()))
        if self.module is not self.program.module:
            self.module, self.program.first_run = self.program.module, None
        for name, value, before in guarded:
            expect_unchanged(value, before, name)
        made = dict(zip(self._names, values, strict=True))
        if self._in_module_memory is None:
            self._in_module_memory = names_in_module_memory(plan.sent, made, self.program.module)
        if self._in_module_memory:
            copy_values(self._in_module_memory, made)
        # Metadata exchange in a first step; in later ones check that the layouts are the same.
        if not self._metadata.is_sent:
            self._metadata.send(made)
            for boundary in (channel.boundary for channel in self._channels_out):
                self._layouts |= {name: boundary.layouts[name] for name in boundary.values}
        for name, layout in self._layouts.items():
            check_layout(name, made[name], layout)
        # Keep what the backward and the sends need.
        if self._train:
            in_flight.outputs = made if self._keep_outputs else None
            self._prepare_backward(in_flight, made, microbatch)
            self._in_flight[microbatch] = in_flight
        for local in self._local_out:
            local.give(Direction.ACTIVATION, microbatch, self._own_activations(local, made))
        if self._sends_activations:
            self._made[microbatch] = made
        if plan.results:
            self.results[microbatch] = results = []
            for name in plan.results:
                result = made[name]
                results.append(result.detach() if isinstance(result, torch.Tensor) else result)
        # No value of which other stages need metadata only.
        for name in self._not_sent:
            del made[name]

    def send_activation(self, microbatch: int, channels: Sequence[Channel], last: bool) -> None:
        """Start to send activations (B, T, H) over ``channels``; free them after the ``last`` send."""
        made = self._made.pop(microbatch) if last else self._made[microbatch]
        for channel in channels:
            channel.give(Direction.ACTIVATION, microbatch, channel.boundary.activations_in(made))

    def backward(self, microbatch: int) -> None:
        """Run a full backward: gradients of the parameters and of received activations (B, T, H)."""
        in_flight = self._in_flight.pop(microbatch)
        roots, starts = self._roots(in_flight, microbatch)
        if roots:
            start = self._stamp()
            run_backward(roots, starts)
            self._blocks.append((self._plan.stage, ActionKind.BACKWARD, microbatch, start, self._stamp()))
        self._keep_gradients(microbatch, list(map(_gradient_of, in_flight.received)), in_flight.has_items)

    def input_gradient(self, microbatch: int) -> None:
        """Compute the gradients of received activations (B, T, H); ``weight_gradient`` computes the others."""
        in_flight = self._in_flight[microbatch]
        roots, starts = self._roots(in_flight, microbatch)
        split = SplitBackward(self._analysis, in_flight.entries, roots)
        start = self._stamp()
        gradients = split.input_gradients(starts)
        self._blocks.append((self._plan.stage, ActionKind.INPUT_GRADIENT, microbatch, start, self._stamp()))
        # Free all but what the weight-gradient needs.
        self._in_flight[microbatch] = _InFlight([], split=split)
        self._keep_gradients(microbatch, gradients, in_flight.has_items)

    def weight_gradient(self, microbatch: int) -> None:
        """Compute the gradients of the parameters."""
        split = self._in_flight.pop(microbatch).split
        assert split is not None, "the input-gradient comes first"
        start = self._stamp()
        split.weight_gradients()
        self._blocks.append((self._plan.stage, ActionKind.WEIGHT_GRADIENT, microbatch, start, self._stamp()))

    def send_gradient(self, microbatch: int, channels: Sequence[Channel], last: bool) -> None:
        """Start to send gradients (B, T, H) over ``channels``; free them after the ``last`` send."""
        gradients = self._gradients.pop(microbatch) if last else self._gradients[microbatch]
        for channel in channels:
            channel.give(Direction.GRADIENT, microbatch, gradients[channel.boundary.source])

    def _receive(self, microbatch: int, in_flight: _InFlight) -> dict[str, Any]:
        """The values of the source stages, in the autograd graph when training."""
        if not self._metadata.is_received:
            self._incoming = self._metadata.receive(self._train)
        received: dict[str, Any] = {}
        for channel, entering, values, are_tensors in self._incoming:
            tensors = channel.take(Direction.ACTIVATION, microbatch)
            for number in entering:
                # Only the graph may hold the tensor: its backward frees it.
                arrived = ReceivedTensor(tensors[number])
                tensors[number] = None
                entered: Any = arrived.enter_graph()
                tensors[number] = entered
                in_flight.received.append(arrived)
                if self._splits:
                    # ``Note: views under a split backward``. ``get_gradient_edge`` takes three times as long.
                    in_flight.entries.append(GradientEdge(entered.grad_fn, 0))
                    in_flight.kept.append(entered.view_as(entered).grad_fn)
            # Tensors are numbered value by value.
            at = 0
            for name, layout in values:
                if are_tensors:
                    received[name] = tensors[at]
                    at += 1
                else:
                    end = at + len(layout.tensors)
                    received[name] = layout.build(tensors[at:end])
                    at = end
        return received

    def _prepare_backward(self, in_flight: _InFlight, made: dict[str, Any], microbatch: int) -> None:
        for name in self._plan.sent:
            value = made[name]
            for position, tensor in enumerate((value,) if isinstance(value, torch.Tensor) else tensors_of(value)):
                if tensor.requires_grad:
                    in_flight.roots[name, position] = edge_of(tensor)
        if self._plan.results:
            in_flight.loss = self._loss.differentiated(microbatch, made[self._plan.results[0]])
            # Without items the loss has no backward, and earlier stages get zeros.
            in_flight.has_items = in_flight.loss is not None

    def _roots(self, in_flight: _InFlight, microbatch: int) -> tuple[list[Any], list[torch.Tensor]]:
        """The roots of a backward, and the gradient (B, T, H) of each: the sum over the destinations.

        The latest destination is the first of the sum, as in autograd.
        """
        parts: list[tuple[BoundaryTensor, torch.Tensor | None]] = []
        for channel in self._channels_out:
            parts += zip(channel.boundary.gradients, channel.take(Direction.GRADIENT, microbatch), strict=True)
        gradients: dict[tuple[str, int], torch.Tensor] = {}
        for entry, gradient in reversed(parts):
            if gradient is not None:
                key = (entry.value, entry.position)
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
        # A root is missing when its parameters were frozen after the metadata exchange.
        roots: list[Any] = []
        starts: list[torch.Tensor] = []
        for key, total in gradients.items():
            if key in in_flight.roots:
                roots.append(in_flight.roots[key])
                starts.append(total)
        if in_flight.loss is not None:
            roots.append(in_flight.loss)
            starts.append(self._loss_gradient(in_flight.loss))
        return roots, starts

    def _own_activations(self, channel: Channel, made: dict[str, Any]) -> list[torch.Tensor]:
        """Activations for a stage of this rank; copies where other stages receive them too."""
        return [
            copied(tensor) if len(self._plan.sent[entry.value]) > 1 else tensor
            for entry, tensor in zip(channel.boundary.activations, channel.boundary.activations_in(made), strict=True)
        ]

    def _keep_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None], has_items: bool) -> None:
        """Give the gradients of received activations to stages of this rank, and keep the others until their send.

        They are zeros for a microbatch without items.
        """
        remaining = iter(gradients)
        by_source: dict[int, list[torch.Tensor | None]] = {}
        for channel in self._channels_in:
            by_source[channel.boundary.source] = kept = []
            for entry, gradient in zip(channel.boundary.gradients, remaining, strict=False):
                if not has_items:
                    gradient = entry.layout.allocate(self._device).zero_()
                elif gradient is not None and not has_own_memory(gradient):
                    gradient = copied(gradient)
                kept.append(gradient)
        for local in self._local_in:
            local.give(Direction.GRADIENT, microbatch, by_source[local.boundary.source])
        if self._sends_gradients:
            self._gradients[microbatch] = by_source
