"""What one stage does at each action of a schedule.

The way of one microbatch through a stage::

    FORWARD             wait for what earlier stages made; run the stage's graph; keep the roots of its backward
    BACKWARD            wait for the gradients of what was sent; run autograd from the roots; drop the microbatch
    INPUT_GRADIENT      wait for them; compute the gradients of what was received
    WEIGHT_GRADIENT     compute the gradients of the parameters; drop the microbatch
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nxdpp.pipeline.backward.graph import BackwardAnalysis
from nxdpp.pipeline.backward.run import run_backward
from nxdpp.pipeline.backward.split import SplitBackward
from nxdpp.pipeline.p2p.layout import check_layout, layout_of, shared_memory, tensors_of
from nxdpp.pipeline.p2p.link import Link, LocalLink
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.pipeline.runtime.received import Arrival, own_memory
from nxdpp.pipeline.runtime.stand_in import stand_in
from nxdpp.pipeline.runtime.step_timer import StepTimer
from nxdpp.pipeline.stages.in_place_guard import expect_unchanged, versions
from nxdpp.pipeline.stages.program import StageProgram


@dataclass
class _Live:
    """A microbatch between its forward and its backward.

    ``entries`` are where received tensors enter the autograd graph, ``roots`` where its backward starts; both are
    places that keep no activation alive.
    """

    arrivals: list[Arrival]
    entries: list[GradientEdge] = field(default_factory=list)
    roots: dict[tuple[str, int], GradientEdge] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    outputs: Any = None
    split: SplitBackward | None = None


class StageRunner:
    """One stage for inputs of one signature, step after step.

    Args:
        program: the stage.
        links_in: the ways over its borders to earlier stages, in their order.
        links_out: those to later stages.
        device: where the stage is.
        train: whether backwards follow; the stage's first result is then the loss, and its mean over the
            microbatches is what is differentiated.
        keep_outputs: hold sent activations until their backward, as plain autograd would.
        splits: whether backwards come in two parts.
    """

    def __init__(
        self,
        program: StageProgram,
        links_in: Sequence[Link],
        links_out: Sequence[Link],
        device: torch.device,
        train: bool,
        keep_outputs: bool,
        splits: bool,
    ) -> None:
        self.results: dict[int, list[Any]] = {}
        self._program = program
        self._plan = program.plan
        self._links_in = links_in
        self._links_out = links_out
        # No action of the schedule sends what stays on this rank, nor what is only described.
        self._handed_on = [link for link in links_out if isinstance(link, LocalLink)]
        self._handed_back = [link for link in links_in if isinstance(link, LocalLink)]
        self._sends_activations = any(link.border.values for link in links_out if link not in self._handed_on)
        self._sends_gradients = any(link.border.values for link in links_in if link not in self._handed_back)
        self._device = device
        self._train = train
        self._keep_outputs = keep_outputs
        self._splits = splits
        self._stand_ins: dict[str, Any] | None = None
        self._sharing_memory: list[str] = []
        self._described = False
        self._analysis = BackwardAnalysis()
        self._inputs: Sequence[dict[str, Any]] = ()
        self._timer = StepTimer(device)
        self._made: dict[int, dict[str, Any]] = {}
        self._live: dict[int, _Live] = {}
        self._gradients: dict[int, dict[int, list[torch.Tensor]]] = {}

    def begin(self, inputs: Sequence[dict[str, Any]], timer: StepTimer) -> None:
        """A step begins with these inputs for each microbatch; ``timer`` is told when the stage computes."""
        self.results = {}
        self._inputs = inputs
        self._timer = timer

    def end(self) -> None:
        """The step is over: forget what it was about."""
        self._inputs = ()
        self.results = {}
        for state in (self._made, self._live, self._gradients):
            state.clear()

    def forward(self, microbatch: int) -> None:
        """Run the stage."""
        live = _Live([])
        received = self._receive(microbatch, live)
        plan, program, inputs = self._plan, self._program, self._inputs[microbatch]
        guarded = [(name, received[name], versions(received[name])) for name in self._sharing_memory]
        arguments = program.arguments(inputs, received, self._stand_ins or {})
        with self._timer:
            # Not through ``__call__``: there are no hooks, and its wrappers take time.
            values = program.module.forward(*arguments)
        for name, value, before in guarded:
            expect_unchanged(value, before, name)
        made = dict(zip(plan.made, values, strict=True))
        if not self._described:
            self._describe(made)
        for link in self._links_out:
            for name in link.border.values:
                check_layout(name, made[name], self._layouts(link)[name])
        if self._train:
            self._prepare_backward(live, made)
            self._live[microbatch] = live
        for link in self._handed_on:
            link.give(Direction.ACTIVATION, microbatch, self._handed(link, made))
        if self._sends_activations:
            self._made[microbatch] = made
        if plan.results:
            results = [made[name] for name in plan.results]
            self.results[microbatch] = [r.detach() if isinstance(r, torch.Tensor) else r for r in results]

    def send_activation(self, microbatch: int, links: Sequence[Link], last: bool) -> None:
        """Start to send over ``links``; ``last`` where nothing is left to send of this microbatch afterwards."""
        made = self._made.pop(microbatch) if last else self._made[microbatch]
        for link in links:
            link.give(Direction.ACTIVATION, microbatch, _activations(link, made))

    def backward(self, microbatch: int) -> None:
        """Gradients of parameters and of what was received."""
        live = self._live.pop(microbatch)
        roots, starts = self._roots(live, microbatch)
        if roots:
            with self._timer:
                run_backward(roots, starts)
        self._keep_gradients(microbatch, [arrival.gradient for arrival in live.arrivals])

    def input_gradient(self, microbatch: int) -> None:
        """Gradients of what was received; those of the parameters are left to ``weight_gradient``."""
        live = self._live[microbatch]
        roots, starts = self._roots(live, microbatch)
        split = SplitBackward(self._analysis, live.entries, roots)
        with self._timer:
            gradients = split.input_gradients(starts)
        # All that is left of the microbatch is what its weight-gradient needs.
        self._live[microbatch] = _Live([], split=split)
        self._keep_gradients(microbatch, gradients)

    def weight_gradient(self, microbatch: int) -> None:
        """Gradients of the parameters."""
        split = self._live.pop(microbatch).split
        assert split is not None, "the input-gradient comes first"
        with self._timer:
            split.weight_gradients()

    def send_gradient(self, microbatch: int, links: Sequence[Link], last: bool) -> None:
        """Start to send over ``links`` the gradients of what came over them."""
        gradients = self._gradients.pop(microbatch) if last else self._gradients[microbatch]
        for link in links:
            link.give(Direction.GRADIENT, microbatch, gradients[link.border.maker])

    def _receive(self, microbatch: int, live: _Live) -> dict[str, Any]:
        if self._stand_ins is None:
            self._stand_ins = {}
            for link in self._links_in:
                link.learn()
                layouts = self._layouts(link)
                for name in link.border.described:
                    self._stand_ins[name] = stand_in(layouts[name], self._device)
                self._sharing_memory += [name for name in link.border.values if layouts[name].shares_memory]
        received: dict[str, Any] = {}
        for link in self._links_in:
            tensors: dict[str, list[torch.Tensor]] = {name: [] for name in link.border.values}
            arrived = link.take(Direction.ACTIVATION, microbatch)
            for crossing, tensor in zip(link.border.activations, arrived, strict=True):
                if crossing.layout.requires_grad and self._train:
                    live.arrivals.append(Arrival(tensor))
                    tensor = live.arrivals[-1].enter_graph()
                    if self._splits:
                        live.entries.append(get_gradient_edge(tensor))
                tensors[crossing.value].append(tensor)
            for name, parts in tensors.items():
                received[name] = self._layouts(link)[name].build(parts)
        return received

    def _describe(self, made: dict[str, Any]) -> None:
        """Tell the users of this stage's values what they look like."""
        plan = self._plan
        shared = shared_memory(made[name] for name in plan.sent)
        sent = {name: layout_of(made[name], shared) for name in plan.sent}
        described = {name: layout_of(made[name]) for name in plan.described}
        for link in self._links_out:
            border = link.border
            border.agree({n: sent[n] for n in border.values} | {n: described[n] for n in border.described})
            link.describe()
        self._described = True

    def _prepare_backward(self, live: _Live, made: dict[str, Any]) -> None:
        live.outputs = made if self._keep_outputs else None
        for name in self._plan.sent:
            for position, tensor in enumerate(tensors_of(made[name])):
                if tensor.requires_grad:
                    live.roots[name, position] = get_gradient_edge(tensor)
        if self._plan.results:
            live.loss = _checked_loss(made[self._plan.results[0]]) / len(self._inputs)

    def _roots(self, live: _Live, microbatch: int) -> tuple[list[Any], list[torch.Tensor]]:
        gradients = self._returned_gradients(microbatch)
        # A root is missing where parameters were frozen since the layouts were agreed on.
        roots: list[Any] = [live.roots[key] for key in gradients if key in live.roots]
        starts = [gradient for key, gradient in gradients.items() if key in live.roots]
        if live.loss is not None:
            roots.append(live.loss)
            starts.append(torch.ones_like(live.loss))
        return roots, starts

    def _returned_gradients(self, microbatch: int) -> dict[tuple[str, int], torch.Tensor]:
        """The gradient of each value, summed over its users, the latest first as autograd itself would."""
        parts = []
        for link in self._links_out:
            returned = link.take(Direction.GRADIENT, microbatch)
            parts += list(zip(link.border.gradients, returned, strict=True))
        total: dict[tuple[str, int], torch.Tensor] = {}
        for crossing, gradient in reversed(parts):
            key = (crossing.value, crossing.position)
            total[key] = total[key] + gradient if key in total else gradient
        return total

    def _handed(self, link: Link, made: dict[str, Any]) -> list[torch.Tensor]:
        """The activations for a stage of this rank, copies where others have the same memory."""
        activations = _activations(link, made)
        return [
            tensor.clone() if len(self._plan.sent[crossing.value]) > 1 else tensor
            for crossing, tensor in zip(link.border.activations, activations, strict=True)
        ]

    def _keep_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of what was received until they are sent; those that stay on this rank are given."""
        remaining = iter(gradients)
        # A value that took no part in the loss has a gradient of zero, and its maker waits for it.
        by_maker = {
            link.border.maker: [
                own_memory(gradient) if gradient is not None else crossing.layout.allocate(self._device).zero_()
                for crossing, gradient in zip(link.border.gradients, remaining, strict=False)
            ]
            for link in self._links_in
        }
        for link in self._handed_back:
            link.give(Direction.GRADIENT, microbatch, by_maker[link.border.maker])
        if self._sends_gradients:
            self._gradients[microbatch] = by_maker

    def _layouts(self, link: Link) -> Any:
        assert link.border.layouts is not None, "described along with the first microbatch"
        return link.border.layouts


def _activations(link: Link, made: dict[str, Any]) -> list[torch.Tensor]:
    return [tensors_of(made[crossing.value])[crossing.position].detach() for crossing in link.border.activations]


def _checked_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValueError(
            f"the loss must be a tensor of one element, not {loss!r:.80}. Name it with output_loss_value_spec."
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any parameter that requires a gradient: nothing is left to train. "
            "Set requires_grad of the parameters to train, or use run_eval."
        )
    return loss
