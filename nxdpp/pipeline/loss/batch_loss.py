"""A loss over the whole batch (``loss_over="batch"``): ``loss_fn`` is called once a step, on the outputs of all rows.

Each forward of the last stage gives its output to a collector, which returns a scalar in the place of the loss. The
last one calls the function on the joined outputs, and keeps the gradient of each part for its microbatch's backward::

    F0 ─ output (b, H) ─┐                             ┌─▶ gradient (b, H) ─ B0
    F1 ─ output (b, H) ─┼▶ loss_fn (B, H) ─ backward ─┼─▶ gradient (b, H) ─ B1
    F2 ─ output (b, H) ─┘                             └─▶ gradient (b, H) ─ B2

So all forwards of the last stage come before its first backward, in order: schedules such as GPipe, which keep the
activations of all microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdpp.devices.autocast import without_autocast
from nxdpp.ground.torch_names import pytree
from nxdpp.pipeline.loss.step_loss import StepLoss, checked_loss
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension, dimensions_of, output_dimension
from nxdpp.pipeline.stages.loss import LossGradient
from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tracing.models.loss_function import nodes_of, verify_leaves
from nxdpp.tracing.values.input_dicts import close_inputs, open_inputs
from nxdpp.tracing.values.nested import flatten, leaves_of


def check_forwards_first(schedule: ChosenSchedule) -> None:
    """Raise ``ValueError`` for a ``schedule`` with a backward of the last stage before its last forward."""
    last = schedule.placement.stages - 1
    if _forwards_come_first(schedule.training, last):
        return
    raise ValueError(
        f"loss_over='batch' computes the loss when the last stage has the outputs of all {schedule.microbatches} "
        f"microbatches, and schedule={schedule.name[:40]!r} has a backward there before. Schedules with all forwards "
        f"first: 'gpipe', 'looped-bfs'. They keep the activations of all microbatches."
    )


def _forwards_come_first(schedule: Schedule, stage: int) -> bool:
    own = [action for actions in schedule for action in actions if action.stage == stage]
    forwards = [action.microbatch for action in own if action.kind is ActionKind.FORWARD]
    begun = [action.kind is ActionKind.FORWARD for action in own[: len(forwards)]]
    return all(begun) and forwards == sorted(forwards)


class BatchLoss:
    """``function``, a loss of the output and of inputs by name, over the outputs of all microbatches of a step.

    Outside of a step, which ``begin`` begins, a call is one of ``function``.

    Args:
        function: of the user.
        batch_dimension: of inputs and outputs.
        loss_gradient: gives the gradient with which the backward of the loss begins.

    Attributes:
        loss: of the last step, detached.
    """

    def __init__(
        self, function: Callable[..., Any], batch_dimension: BatchDimension | None, loss_gradient: LossGradient
    ) -> None:
        self.loss = torch.zeros(())
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self._dimension, self._loss_gradient = function, batch_dimension, loss_gradient
        self._step: _CollectedStep | None = None

    def begin(
        self, microbatches: int, rows: int | None, module: nn.Module, is_of_no_input: Sequence[bool] = ()
    ) -> None:
        """Begin a step of ``microbatches`` of the model ``module``, the first with ``rows``, where its inputs tell.

        ``is_of_no_input`` tells for each value of the output whether it is computed of no input; empty if unknown.
        """
        self._step = _CollectedStep(microbatches, rows, module, is_of_no_input)

    def end(self) -> None:
        """End the step: a call is one of the function again."""
        self._step = None

    def __call__(self, output: Any, **inputs: Any) -> Any:
        """Take the output of the next microbatch, and return a scalar whose backward gives its gradient."""
        step = self._step
        if step is None:
            return self._function(output, **inputs)
        tensors = [each for each in leaves_of(output) if isinstance(each, torch.Tensor)]
        trained = [each for each in tensors if each.requires_grad] if torch.is_grad_enabled() else []
        ends = {id(each): each.detach().requires_grad_() for each in trained}
        leaves, spec = flatten(output)
        opened = open_inputs(inputs)
        if step.outputs and (spec != step.spec or opened.keys() != step.inputs[0].keys()):
            raise ValueError(
                f"loss_over='batch' joins the outputs of microbatches, and those of microbatch {len(step.outputs)} "
                f"have another structure, or other inputs of loss_fn, than those of microbatch 0: {sorted(opened)} and "
                f"{sorted(step.inputs[0])}. Give all microbatches the same inputs."
            )
        step.spec = spec
        step.outputs.append([ends.get(id(leaf), leaf) for leaf in leaves])
        step.inputs.append(opened)
        if len(step.outputs) == step.microbatches:
            self._step = None
            self._compute(step)
        if not trained:
            return torch.zeros(())
        return _Collected.apply(list(ends.values()), *{id(each): each for each in trained}.values())  # type: ignore[no-untyped-call]

    def _compute(self, step: "_CollectedStep") -> None:
        assert step.spec is not None
        columns = [*zip(*step.outputs, strict=True)]
        is_free = step.is_of_no_input if len(step.is_of_no_input) == len(columns) else [False] * len(columns)
        joined = [self._joined(list(parts), step.rows, own) for parts, own in zip(columns, is_free, strict=True)]
        along = dimensions_of(step.inputs[0], self._dimension)
        inputs = {n: _joined_input([each[n] for each in step.inputs], along[n]) for n in step.inputs[0]}
        loss = self._function(pytree.tree_unflatten(joined, step.spec), **close_inputs(inputs))
        if torch.is_grad_enabled():
            ends = [e for leaves in step.outputs for e in leaves if isinstance(e, torch.Tensor) and e.requires_grad]
            checked = checked_loss(loss)
            verify_leaves(checked, nodes_of(ends) or frozenset(), step.module)
            with without_autocast():
                checked.backward(self._loss_gradient(checked))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            checked_loss(loss)
        self.loss = loss.detach()

    def _joined(self, parts: list[Any], rows: int | None, is_of_no_input: bool) -> Any:
        """Join an output of all microbatches as ``join_outputs`` does; another statistic of each is refused."""
        first = parts[0]
        if not isinstance(first, torch.Tensor) or len(parts) == 1:
            return first
        if is_of_no_input and all(torch.equal(first, each) for each in parts):
            # Such as a temperature: the gradient of the one takes the way of its microbatch.
            return first
        if first.ndim and (rows is None or rows in first.shape):
            along = output_dimension(first, self._dimension, rows)
            if rows in (None, first.size(along)):
                return torch.cat(parts, along)
        if all(torch.equal(first, each) for each in parts):
            return first
        raise ValueError(
            f"loss_over='batch' joins the outputs of microbatches by their rows, and an output has the shape "
            f"{tuple(first.shape)}, other values in each microbatch, and no {rows} rows. Return values (B, ...)."
        )


@dataclass
class _CollectedStep:
    """A step that collects: outputs, with new leaves of autograd, and opened inputs of the microbatches so far."""

    microbatches: int
    rows: int | None
    module: nn.Module
    is_of_no_input: Sequence[bool]

    def __post_init__(self) -> None:
        self.outputs: list[list[Any]] = []
        self.inputs: list[Mapping[str, Any]] = []
        self.spec: pytree.TreeSpec | None = None


def _joined_input(parts: list[Any], dimension: int) -> Any:
    first = parts[0]
    is_whole = not isinstance(first, torch.Tensor) or not first.ndim or all(each is first for each in parts)
    return first if is_whole else torch.cat(parts, dimension)


class _Collected(torch.autograd.Function):
    """A scalar of outputs, whose gradients are the ``.grad`` of ``ends``, leaves with the same values."""

    @staticmethod
    def forward(ctx: Any, ends: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.ends = ends
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(end.grad for end in ctx.ends)


@dataclass(frozen=True)
class LossOfBatch(StepLoss):
    """The loss of a step over its whole batch; its microbatches have no losses of their own.

    Attributes:
        batch_loss: collects the outputs.
        rows: of the first microbatch; ``None`` where its inputs do not tell.
        module: the model.
        is_of_no_input: for each value of the output, whether it is computed of no input.
    """

    batch_loss: BatchLoss | None = None
    rows: int | None = 1
    module: nn.Module | None = None
    is_of_no_input: Sequence[bool] = ()

    def begin(self) -> None:
        """Begin a run of the microbatches."""
        assert self.batch_loss is not None
        assert self.module is not None
        self.batch_loss.begin(len(self.microbatches), self.rows, self.module, self.is_of_no_input)

    def scaled(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the loss of the batch alone, on the rank that has ``losses``."""
        assert self.batch_loss is not None
        return [self.batch_loss.loss] if losses else []
