"""Comparison of a first training step with the unwrapped module (``check_against_module="first"``).

Every rank gathers the present values of all ranks, runs a copy of the whole module on all microbatches, and compares
its own gradients. The rank of the last stage compares the losses::

    gather values ─▶ copy of the module ─▶ loss of the whole batch, compared with the mean: a warning
    gather values ─▶ copy of the module ─▶ losses, gradients ─┐
    step of the pipeline ─────────────────▶ losses, gradients ─┴▶ compare, gather differences, raise on all ranks
"""

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from nxdpp.devices.autocast import without_autocast
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.gradient_dtype import accumulate_in, gradient_dtype
from nxdpp.ground.torch_names import COMPILED_CALL
from nxdpp.initialization.allocation import with_type_of
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.elsewhere_tensors import ordinary
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.loss.batch_loss import LossOfBatch
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.microbatches.mixed_rows import compare_with_whole, warn_of_no_whole
from nxdpp.pipeline.microbatches.rows import on_device
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.pipeline.stages.loss import loss_of_sample
from nxdpp.pipeline.step import Participant, Step
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.group_values import gather_values
from nxdpp.tracing.models.transformers_models import transformers_models
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.input_dicts import close_inputs

_SHOWN = 5
_DRAWS = (
    "the module draws random numbers (dropout), other ones in a pipeline than in one process. Call eval() on the "
    "wrapped model for the first step, or set the rates to 0"
)
_COMPILED = (
    "its modules are compiled, and compiled code rounds in its own way. Call apply_compile after the first step, or "
    "leave check_against_module out"
)
_DIFFERS = (
    "check_against_module: the first step differs from the module in one process. Code outside its layers may depend "
    "on something that the trace has fixed: make the module that holds it a leaf (leaf_module_cls), or the function a "
    "single node (autowrap_functions)"
)
_ONLY_GRADIENTS = (
    ". The losses are equal: a hook of a parameter (register_hook), which the comparison leaves out, may change its "
    "gradient, or loss_fn may read parameters of its own rank only (a penalty). Do both to the gradients of the step, "
    "after run_train"
)
_LOSS = "the loss of microbatch"
# A tensor's value on the CPU, and whether it requires a gradient.
_Value = tuple[torch.Tensor, bool]


class Reference(Participant):
    """The first step of the unwrapped module in one process, with which the pipeline's is compared.

    Args:
        part: of this rank. Tensors of other ranks are on the meta device in its whole model.
        owners: the stages of each parameter.
        config: settings of the pipeline.
    """

    def __init__(self, part: Part, owners: Owners, config: PipelineConfig) -> None:
        self._part, self._owners, self._config = part, owners, config
        self._whole, self._local = part.root, part.module
        self._is_over = False

    def before(self, step: Step) -> None:
        """Note the gradients from before the first step."""
        if not self._is_over:
            self._device, self._group = step.device, parallel_state.get_pipeline_control_group()
            self._earlier = {name: parameter.grad for name, parameter in listings.named_parameters(self._local)}
            self._losses: list[torch.Tensor] = []
            self._gradients: dict[str, torch.Tensor | None] = {}

    def after(self, step: Step) -> None:
        """Run the step in one process; collective over the pipeline.

        Parameters, buffers, gradients and global random generators are as before. The loss of a batch in one piece is
        compared with the mean of the microbatches' too.

        Raises ``RuntimeError``, on all ranks, for a module that draws random numbers or cannot be run in one process,
        and for compiled modules.
        """
        if self._is_over:
            return
        whole = step.whole(self._config)
        values = self._gathered({name: (t.detach().cpu(), t.requires_grad) for name, t in _tensors(self._local)})

        def act() -> list[str]:
            if any(COMPILED_CALL.of(module) is not None for module in listings.modules(self._local)):
                return [_COMPILED]
            with _unchanged_generators(self._device) as have_moved:
                one = None if whole is None else self._loss_of_whole(self._copy(values), whole)
                module = self._copy(values)
                with _noted_progress(module):
                    self._train(module, step.loss)
                if one is not None:
                    compare_with_whole(one, self._losses)
                return [_DRAWS] if have_moved() else []

        self._raise_together(act, "check_against_module cannot compare this step")

    def finish(self, step: Step) -> None:
        """Compare after the step of the pipeline; collective over the pipeline.

        Numbers are compared bit for bit, and to rounding where a sum has another order than in one process: for tied
        weights, and for all gradients where several stages use one value. Two runs on a GPU may differ too, unless
        deterministic algorithms are chosen.

        Raises ``RuntimeError``, on all ranks, with what differs and both numbers.
        """
        if self._is_over:
            return
        spec = self._config.output_loss_value_spec
        plans = [plan for cut in step.graphs.cuts for plan in cut.plans([cut.loss_of_sample(spec)])]
        losses = [each[0] for each in step.values if each]
        parameters = dict(listings.named_parameters(self._local))
        varies = self._device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
        in_another_order = varies or any(len(stages) > 1 for plan in plans for stages in plan.sent.values())

        tied = {name for names in self._part.aliases for name in names}

        if isinstance(step.loss, LossOfBatch):
            losses = step.loss.scaled(losses)

        def act() -> list[str]:
            both = enumerate(zip(losses, self._losses, strict=False))
            texts = [_difference(f"{_LOSS} {i}", ours, theirs, varies) for i, (ours, theirs) in both]
            for name, parameter in parameters.items():
                is_rounded = in_another_order or name in tied or len(self._owners.get(name, ())) > 1
                texts.append(_difference(f"the gradient of {name}", parameter.grad, self._gradients[name], is_rounded))
            different = [text for text in texts if text is not None]
            more = [f"and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
            return different[:_SHOWN] + more

        self._raise_together(act, _DIFFERS, _ONLY_GRADIENTS)
        # Free what only this step needs.
        self._is_over, self._earlier, self._gradients, self._losses = True, {}, {}, []

    def _copy(self, values: Sequence[Mapping[str, _Value]]) -> nn.Module:
        """A copy of the whole module with the present values of all ranks."""
        known: dict[str, _Value] = {}
        for of_rank in reversed(values):
            known |= of_rank
        # The first owner's values, and gradients of this rank's parameters, for the module's own tensors.
        memo: dict[int, Any] = {}
        tensors = dict(_tensors(self._whole))
        first = {name: names[0] for names in self._part.aliases for name in names}
        by_name: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if first.get(name, name) in by_name:
                memo[id(tensor)] = by_name[first[name]]
            elif id(tensor) not in memo and name in known:
                value, requires_grad = known[name]
                made = with_type_of(value.to(self._device, copy=True), ordinary(tensor)).requires_grad_(requires_grad)
                accumulate_in(made, gradient_dtype(tensor))
                earlier = self._earlier.get(name)
                made.grad = None if earlier is None else earlier.clone()
                memo[id(tensor)] = by_name[first.get(name, name)] = made
        if known.keys() - tensors.keys() or any(id(tensor) not in memo for tensor in tensors.values()):
            raise RuntimeError("modules were replaced after wrapping, and other ranks do not know of it")
        module = copy.deepcopy(self._whole, memo)
        for model in transformers_models(module).values():
            # A pipeline has no key-value cache.
            model.config.use_cache = False
        return module

    def _train(self, module: nn.Module, step: StepLoss) -> None:
        if isinstance(step, LossOfBatch):
            step.begin()
            # The last forward computes the loss.
            kept = [self._loss(module, microbatch) for microbatch in step.microbatches]
            self._losses = step.scaled(kept)
            for number, loss in enumerate(kept):
                self._backward(step, number, loss)
            step.begin()
        else:
            for number, microbatch in enumerate(step.microbatches):
                loss = self._loss(module, microbatch)
                self._backward(step, number, loss)
                self._losses.append(loss.detach())
        gradients = {n: parameter.grad for n, parameter in listings.named_parameters(module, remove_duplicate=False)}
        self._gradients = {name: gradients[name] for name, _ in listings.named_parameters(self._local)}

    def _loss(self, module: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        spec, function = self._config.output_loss_value_spec, self._config.loss_function
        loss: torch.Tensor = loss_of_sample(module, close_inputs(inputs), spec, function)
        return loss

    def _backward(self, step: StepLoss, number: int, loss: torch.Tensor) -> None:
        part = step.differentiated(number, loss)
        if part is not None:
            # As in the step of the pipeline.
            with without_autocast():
                part.backward(self._config.loss_gradient(part))
        board.moved()

    def _loss_of_whole(self, module: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """The loss of the whole batch in one piece; ``None`` with a warning where the module cannot run it."""
        (on_it,) = on_device([dict(inputs)], self._device)
        if self._config.batch_loss is not None:
            self._config.batch_loss.end()
        try:
            with torch.no_grad(), _noted_progress(module):
                loss = self._loss(module, on_it)
        except Exception as error:
            warn_of_no_whole(error)
            return None
        return loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

    def _raise_together(self, act: Callable[[], list[str]], message: str, of_gradients: str = "") -> None:
        own: Exception | None = None
        try:
            found = act()
        except Exception as error:
            own, found = error, [f"{type(error).__name__}: {error}"]
        everyones = self._gathered(found)
        if any(everyones):
            lines = [f"  rank {rank}: {line}" for rank, of_rank in enumerate(everyones) for line in of_rank]
            more = "" if any(line.startswith(_LOSS) for of_rank in everyones for line in of_rank) else of_gradients
            raise RuntimeError("\n".join([f"{message}{more}:", *lines])) from own

    def _gathered(self, value: Any) -> list[Any]:
        with failure_watch.reported():
            return gather_values(value, self._group)


@contextmanager
def _noted_progress(module: nn.Module) -> Iterator[None]:
    """Note each forward of a submodule, and each gradient of a parameter, on the board: the whole model may be slow."""

    def note(*_: object) -> None:
        board.moved()

    hooks = [nn.modules.module.register_module_forward_pre_hook(note)]
    trained = (parameter for parameter in listings.parameters(module) if parameter.requires_grad)
    hooks += [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from listings.named_parameters(module, remove_duplicate=False)
    yield from listings.named_buffers(module, remove_duplicate=False)


def _difference(what: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, is_rounded: bool) -> str | None:
    """Text about a difference, with the two numbers that are farthest apart; ``None`` without one."""
    if ours is None or theirs is None:
        left = ours if theirs is None else theirs
        if left is None:
            return None
        places = ("one process", "the pipeline") if ours is None else ("the pipeline", "one process")
        return f"{what} is {float(left.abs().max()):.9g} at most in {places[0]}, and missing in {places[1]}"
    if torch.equal(ours, theirs):
        return None
    # Equal infinities and NaNs are not a difference.
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = (ours - theirs).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0)
    # Of numbers alone: beside an infinity or a not-a-number all others would be equal, or none.
    largest = float(theirs.abs().nan_to_num(0, 0).max())
    limit = largest * torch.finfo(theirs.dtype).eps ** 0.5 if is_rounded else 0.0
    if float(apart.max()) <= limit:
        return None
    here, there = (float(each.reshape(-1)[int(apart.argmax())]) for each in (ours, theirs))
    return f"{what} has {here:.9g} in the pipeline, {there:.9g} in one process"


@contextmanager
def _unchanged_generators(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore the global generators afterwards; give a function that returns whether one of them has moved."""
    before = _generators(device)
    try:
        yield lambda: _generators(device) != before
    finally:
        torch.set_rng_state(torch.frombuffer(bytearray(before[0]), dtype=torch.uint8))
        device_of(device).set_random_state(before[1])
        random.setstate(before[2])
        numpy.random.set_state(pickle.loads(before[3]))


def _generators(device: torch.device) -> tuple[bytes, bytes, Any, bytes]:
    of_device = device_of(device).random_state()
    return torch.get_rng_state().numpy().tobytes(), of_device, random.getstate(), pickle.dumps(numpy.random.get_state())
