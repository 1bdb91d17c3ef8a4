"""Runs a lowered schedule on one rank. It decides nothing.

The way of one microbatch through a stage::

    RECEIVE_ACTIVATION  post the receives of what earlier stages make
    FORWARD             wait for them; run the stage's graph; keep the roots of its backward
    SEND_ACTIVATION     start to send what later stages need
    RECEIVE_GRADIENT    post the receives of the gradients of what was sent
    BACKWARD            wait for them; run autograd from the roots; drop the microbatch
    SEND_GRADIENT       start to send the gradients of what was received
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nxdpp.parallel_layers import failure_watch
from nxdpp.pipeline.arrival import Arrival
from nxdpp.pipeline.layout import check_layout, layout_of, shared_memory, tensors_of
from nxdpp.pipeline.program import Agreement, Crossing, StageProgram
from nxdpp.pipeline.stand_in import stand_in
from nxdpp.pipeline.step_timer import StepTimer
from nxdpp.pipeline.transport import Direction, Transport
from nxdpp.pipeline.unchanged import expect_unchanged, versions
from nxdpp.schedules.actions import Action, ActionKind

# Descriptions go under this tag, tensors under those after it.
_DESCRIPTION_TAG = 0

Pending = list[Callable[[], torch.Tensor]]


@dataclass
class _Live:
    """A microbatch between its forward and its backward.

    ``roots`` are places in the autograd graph and keep no activation alive.
    """

    arrivals: list[Arrival]
    roots: dict[tuple[str, int], GradientEdge] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    outputs: Any = None


class Engine:
    """One step of one stage.

    Args:
        program: the stage.
        agreement: what is known of the values that cross for these inputs; ``None`` has the neighbours describe
            them to each other along with the first microbatch.
        transport: the way to the other stages, whose ranks in it are their numbers.
        inputs: the model's inputs for each microbatch.
        device: where the stage is.
        train: whether backwards follow; the stage's first result is then the loss, and its mean over the
            microbatches is what is differentiated.
        keep_outputs: hold sent activations until their backward, as plain autograd would.
        timer: is told when the stage computes.
        signature: what the agreement belongs to; the same on all ranks.
    """

    def __init__(
        self,
        program: StageProgram,
        agreement: Agreement | None,
        transport: Transport,
        inputs: Sequence[dict[str, Any]],
        device: torch.device,
        train: bool,
        keep_outputs: bool,
        timer: StepTimer,
        signature: Any,
    ) -> None:
        self.agreement = agreement
        self.results: list[list[Any]] = []
        self._program = program
        self._plan = program.plan
        self._transport = transport
        self._inputs = inputs
        self._device = device
        self._train = train
        self._keep_outputs = keep_outputs
        self._timer = timer
        self._signature = signature
        self._due_activations: list[int] = []
        self._due_gradients: list[int] = []
        self._arriving: dict[int, Pending] = {}
        self._returning: dict[int, Pending] = {}
        self._made: dict[int, dict[str, Any]] = {}
        self._gradients: dict[int, list[torch.Tensor | None]] = {}
        self._live: dict[int, _Live] = {}
        self._handlers: dict[ActionKind, Callable[[int], None]] = {
            ActionKind.RECEIVE_ACTIVATION: self._receive_activation,
            ActionKind.FORWARD: self._forward,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECEIVE_GRADIENT: self._receive_gradient,
            ActionKind.BACKWARD: self._backward,
            ActionKind.SEND_GRADIENT: self._send_gradient,
        }

    def run(self, actions: Sequence[Action]) -> None:
        """Do ``actions`` in order; all ranks of the pipeline must call this.

        An exception is noted with the action it came from, told to the other ranks, and raised.
        """
        for action in actions:
            try:
                self._handlers[action.kind](action.microbatch)
            except Exception as error:
                what = action.kind.name.lower().replace("_", " ")
                error.add_note(
                    f"in the pipeline: stage {action.stage}, {what} of microbatch {action.microbatch} (action {action})"
                )
                failure_watch.report(error)
                raise
        self._transport.finish_sends()

    def _receive_activation(self, microbatch: int) -> None:
        if self.agreement is None:
            self._due_activations.append(microbatch)
        else:
            self._post_activations(self.agreement, microbatch)

    def _forward(self, microbatch: int) -> None:
        first = self.agreement is None
        agreement = self._hear() if self.agreement is None else self.agreement
        # In the order in which they were due: without tags, messages are told apart by their order alone.
        while self._due_activations:
            self._post_activations(agreement, self._due_activations.pop(0))
        arrivals = [Arrival(wait()) for wait in self._arriving.pop(microbatch, [])]
        received = self._put_together(agreement, arrivals)
        arguments = self._program.arguments(self._inputs[microbatch], received, agreement.stand_ins)
        guarded = [(n, received[n], versions(received[n])) for n, v in agreement.received.items() if v.shares_memory]
        with self._timer.computing():
            values = self._program.module(*arguments)
        for name, value, before in guarded:
            expect_unchanged(value, before, name)
        made = dict(zip(self._plan.made, values, strict=True))
        if first:
            self._describe(agreement, made)
            self.agreement = agreement
            while self._due_gradients:
                self._receive_gradient(self._due_gradients.pop(0))
        if self._plan.sent:
            self._made[microbatch] = made
        if self._train:
            self._live[microbatch] = self._prepare_backward(agreement, arrivals, made)
        results = [made[name] for name in self._plan.results]
        self.results.append([r.detach() if isinstance(r, torch.Tensor) else r for r in results])

    def _hear(self) -> Agreement:
        """Learn from the makers of this stage's values what they look like."""
        agreement = Agreement()
        for maker in self._plan.makers:
            signature, layouts = self._transport.receive_object(maker, _DESCRIPTION_TAG)
            if signature != self._signature:
                raise RuntimeError(
                    f"stage {maker} was given other inputs than stage {self._plan.stage}: {signature} there, "
                    f"{self._signature} here. Give every rank of a pipeline the same batch."
                )
            for name, layout in layouts.items():
                if name in self._plan.received:
                    agreement.received[name] = layout
                else:
                    agreement.stand_ins[name] = stand_in(layout, self._device)
        agreement.note_received(self._plan)
        return agreement

    def _describe(self, agreement: Agreement, made: dict[str, Any]) -> None:
        """Tell the users of this stage's values what they look like."""
        shared = shared_memory(made[name] for name in self._plan.sent)
        agreement.sent = {name: layout_of(made[name], shared) for name in self._plan.sent}
        agreement.note_sent(self._plan)
        stands_for = {name: layout_of(made[name]) for name in self._plan.described}
        for user in self._plan.users:
            layouts = {name: agreement.sent[name] for name, users in self._plan.sent.items() if user in users}
            layouts |= {name: stands_for[name] for name, users in self._plan.described.items() if user in users}
            self._transport.send_object((self._signature, layouts), user, _DESCRIPTION_TAG)

    def _post_activations(self, agreement: Agreement, microbatch: int) -> None:
        self._arriving[microbatch] = self._post(agreement.arriving, Direction.ACTIVATION, microbatch)

    def _put_together(self, agreement: Agreement, arrivals: list[Arrival]) -> dict[str, Any]:
        tensors: dict[str, list[torch.Tensor]] = {name: [] for name in self._plan.received}
        for crossing, arrival in zip(agreement.arriving, arrivals, strict=True):
            differentiable = crossing.layout.requires_grad and self._train
            tensors[crossing.value].append(arrival.enter_graph() if differentiable else arrival.take())
        return {name: agreement.received[name].build(tensors[name]) for name in tensors}

    def _prepare_backward(self, agreement: Agreement, arrivals: list[Arrival], made: dict[str, Any]) -> _Live:
        live = _Live(arrivals, outputs=made if self._keep_outputs else None)
        for name in agreement.sent:
            for position, tensor in enumerate(tensors_of(made[name])):
                if tensor.requires_grad:
                    live.roots[name, position] = get_gradient_edge(tensor)
        if self._plan.results:
            loss = made[self._plan.results[0]]
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise ValueError(
                    f"the loss must be a tensor of one element, not {loss!r:.80}. Name it with output_loss_value_spec."
                )
            if not loss.requires_grad:
                raise ValueError(
                    "the loss does not depend on any parameter that requires a gradient: nothing is left to train. "
                    "Set requires_grad of the parameters to train, or use run_eval."
                )
            live.loss = loss / len(self._inputs)
        return live

    def _send_activation(self, microbatch: int) -> None:
        agreement = self._agreed()
        made = self._made.pop(microbatch)
        for name, layout in agreement.sent.items():
            check_layout(name, made[name], layout)
        for crossing in agreement.leaving:
            tensor = tensors_of(made[crossing.value])[crossing.position]
            self._send(crossing, tensor, Direction.ACTIVATION, microbatch)

    def _receive_gradient(self, microbatch: int) -> None:
        if self.agreement is None:
            self._due_gradients.append(microbatch)
        else:
            awaited = [crossing for crossing in self.agreement.leaving if crossing.layout.requires_grad]
            self._returning[microbatch] = self._post(awaited, Direction.GRADIENT, microbatch)

    def _backward(self, microbatch: int) -> None:
        live = self._live.pop(microbatch)
        gradients = self._returned_gradients(self._returning.pop(microbatch, []))
        # A root is missing where parameters were frozen since the shapes were agreed on.
        roots: list[Any] = [live.roots[key] for key in gradients if key in live.roots]
        starts = [gradient for key, gradient in gradients.items() if key in live.roots]
        if live.loss is not None:
            roots.append(live.loss)
            starts.append(torch.ones_like(live.loss))
        if roots:
            with self._timer.computing():
                torch.autograd.backward(roots, starts)
        if live.arrivals:
            self._gradients[microbatch] = [arrival.gradient for arrival in live.arrivals]

    def _returned_gradients(self, returning: Pending) -> dict[tuple[str, int], torch.Tensor]:
        """The gradient of each value, summed over its users, the latest first as autograd itself would."""
        awaited = [crossing for crossing in self._agreed().leaving if crossing.layout.requires_grad]
        parts = [(crossing, wait()) for crossing, wait in zip(awaited, returning, strict=True)]
        total: dict[tuple[str, int], torch.Tensor] = {}
        for crossing, gradient in reversed(parts):
            key = (crossing.value, crossing.position)
            total[key] = total[key] + gradient if key in total else gradient
        return total

    def _send_gradient(self, microbatch: int) -> None:
        gradients = self._gradients.pop(microbatch, [])
        for crossing, gradient in zip(self._agreed().arriving, gradients, strict=True):
            if crossing.layout.requires_grad:
                # A value that took no part in the loss has a gradient of zero, and its maker waits for it.
                known = gradient if gradient is not None else crossing.layout.allocate(self._device).zero_()
                self._send(crossing, known, Direction.GRADIENT, microbatch)

    def _agreed(self) -> Agreement:
        assert self.agreement is not None, "a forward comes first"
        return self.agreement

    def _post(self, crossings: Sequence[Crossing], direction: Direction, microbatch: int) -> Pending:
        return [self._transport.post_receive(c.layout, c.peer, direction, self._tag(c, microbatch)) for c in crossings]

    def _send(self, crossing: Crossing, tensor: torch.Tensor, direction: Direction, microbatch: int) -> None:
        tensor = crossing.layout.arrange(tensor.detach())
        self._transport.send(tensor, crossing.peer, direction, self._tag(crossing, microbatch), crossing.number)

    def _tag(self, crossing: Crossing, microbatch: int) -> int:
        return 1 + _DESCRIPTION_TAG + crossing.number * len(self._inputs) + microbatch
