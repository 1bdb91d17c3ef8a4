"""XLA sweep: each type over two ranks with XLA devices, against one process on the CPU and one with an XLA device.

All of them train on one batch, padded, in four microbatches. A type is

- exact: loss and gradients are those of the XLA process to the last bit;
- to rounding: they differ from those of both processes by less than 1e-5, measured as by the training sweep;
- refused: our error has the reason;
- XLA's own: the unwrapped model fails in one XLA process, or differs there from the CPU by more than rounding;
- failing: another error;
- WRONG: a difference above rounding.
"""

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from nxdpp import NxDPPModel, parallel_state
from tests.support.forked_ranks import forked_ranks
from tests.support.training_distance import loss_of, relative
from tests.support.xla_process import on_device, placed, run_recorded, start_xla
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import MICROBATCHES, ROUNDING, is_refusal, microbatches_of, without_cache, without_randomness
from tools.zoo.inputs import PADDED
from tools.zoo.sweep import Verdict
from tools.zoo.with_loss import with_loss

RANKS = 2
TIME_LIMIT = 140.0  # seconds for the one process, and for the ranks
STATIC_EXPERTS = "batched_mm"


class Step(NamedTuple):
    """Numbers of a step in host memory: the mean loss, and gradients by original name, ``None`` for a missing one.

    ``names`` are the names of each parameter. A rank may hold a tied parameter under some of them.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    names: list[list[str]]


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type over two XLA ranks with one process on the CPU, and with one on XLA."""
    try:
        notes = _notes(_build(task, model_type))
    except Exception as error:
        return Verdict("does not build", f"{type(error).__name__}: {error}")
    (alone,) = _forked(1, partial(_alone, task, model_type))
    if isinstance(alone, Exception):
        return Verdict("XLA's own", f"the process: {alone}")
    cpu, xla = alone
    if isinstance(cpu, str):
        return Verdict("does not build", cpu)
    if isinstance(xla, str):
        return Verdict("XLA's own", "; ".join([xla, *notes]))
    ranks = _forked(RANKS, partial(_over_ranks, task, model_type))
    if errors := [each for each in ranks if isinstance(each, Exception | Verdict)]:
        # The other rank loses its connection.
        first = min(errors, key=lambda each: "onnection" in str(each))
        return first if isinstance(first, Verdict) else Verdict("failing", f"{type(first).__name__}: {first}")
    return _verdict(ranks, cpu, xla, notes)


def _verdict(ranks: list[Step], cpu: Step, xla: Step, notes: list[str]) -> Verdict:
    held = {name for rank in ranks for name in rank.gradients}
    if missing := [names[0] for names in cpu.names if held.isdisjoint(names)]:
        return Verdict("WRONG", f"no rank has {', '.join(missing)}")
    from_xla, _ = _distance(ranks, xla)
    of_xla, where = _distance([xla], cpu)
    if of_xla >= ROUNDING > from_xla:
        words = f"one XLA process differs from the CPU by {of_xla:.1e} at {where}, the ranks from it by {from_xla:.1e}"
        return Verdict("XLA's own", "; ".join([words, *notes]))
    from_cpu, where = _distance(ranks, cpu)
    if from_xla == 0:
        return Verdict("exact", "; ".join(notes))
    result = "to rounding" if max(from_xla, from_cpu) < ROUNDING else "WRONG"
    words = f"{from_xla:.1e} from XLA, {from_cpu:.1e} from the CPU"
    return Verdict(result, "; ".join([words, *([f"at {where}"] if result == "WRONG" else []), *notes]))


def _forked(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """The results of ``forked_ranks``; tensors travel by value: a process may have ended when they are read."""
    found = forked_ranks(world_size, partial(_pickled, function), TIME_LIMIT)
    return [pickle.loads(each) if isinstance(each, bytes) else each for each in found]


def _pickled(function: Callable[[int], Any], rank: int) -> bytes:
    return pickle.dumps(function(rank))


def _build(task: str, model_type: str) -> Any:
    """The model without dropout and cache; experts are computed in tensors whose shapes do not depend on the data."""
    model: Any = build(task, model_type)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(STATIC_EXPERTS)
    model = with_loss(task, model)
    without_randomness(model)
    without_cache(model)
    return model


def _notes(model: Any) -> list[str]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return sorted({f"experts: {STATIC_EXPERTS}" for config in configs if _experts_of(config) == STATIC_EXPERTS})


def _experts_of(config: Any) -> str | None:
    return getattr(config, "_experts_implementation", None)


def _alone(task: str, model_type: str, rank: int) -> tuple[Step | str, Step | str]:
    """A step on the CPU and one on XLA, in this process, or their errors."""
    device = start_xla()
    return _step_or_error(task, model_type, torch.device("cpu")), _step_or_error(task, model_type, device)


def _step_or_error(task: str, model_type: str, device: torch.device) -> Step | str:
    torch.set_num_threads(1)
    model = _build(task, model_type)
    batch = inputs(task, model, PADDED)
    try:
        model = placed(model, device)
        losses = []
        for microbatch in microbatches_of(batch):
            loss = loss_of(model(**on_device(microbatch, device)))
            (loss / MICROBATCHES).backward()
            run_recorded(device)
            losses.append(loss.detach().cpu())
        return Step(torch.stack(losses).mean(), *_gradients(model.named_parameters(remove_duplicate=False)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _gradients(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[dict[str, torch.Tensor | None], list[list[str]]]:
    """The gradients by name, and the names of each parameter."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in named:
        names.setdefault(parameter, []).append(name)
    gradients = {
        name: None if parameter.grad is None else parameter.grad.detach().cpu()
        for parameter, several in names.items()
        for name in several
    }
    return gradients, list(names.values())


def _over_ranks(task: str, model_type: str, rank: int) -> Step | Verdict:
    torch.set_num_threads(1)
    start_xla()
    model = _build(task, model_type)
    batch = inputs(task, model, PADDED)
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS, device="xla")
        given: dict[str, Any] = ARGUMENTS.get(model_type, {})
        wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **given)
        wrapped.move_model_to_device()
        loss: Any = wrapped.run_train(**batch)
    except Exception as error:
        return Verdict("refused" if is_refusal(error) else "failing", f"{type(error).__name__}: {error}")
    return Step(loss.detach().cpu(), *_gradients(wrapped.local_named_parameters()))


def _distance(steps: list[Step], one: Step) -> tuple[float, str]:
    """Greatest relative difference of the loss and the gradients, with its name, as ``gradient_distances`` measures."""
    present = [gradient.abs().max().item() for gradient in one.gradients.values() if gradient is not None]
    least = max(present, default=0.0) / 1000
    found = [(relative(step.loss, one.loss, 1e-6), "the loss") for step in steps]
    for step in steps:
        for name, gradient in step.gradients.items():
            expected = one.gradients[name]
            ours = torch.zeros_like(expected) if gradient is None and expected is not None else gradient
            theirs = torch.zeros_like(ours) if expected is None and ours is not None else expected
            if ours is not None and theirs is not None:
                found.append((relative(ours, theirs, least), name))
    return max(found)
