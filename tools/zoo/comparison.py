"""Compare a model cut into stages with its unwrapped copy: losses, gradients and buffers."""

import dis
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.tracing.graph.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance, loss_of
from tools.zoo.sweep import Verdict

MICROBATCHES = 4
ROUNDING = 1e-5

Batch = Mapping[str, torch.Tensor]


def compare(
    model: Any,
    whole: Any,
    batches: Sequence[Batch],
    stages: Sequence[int],
    modes: Sequence[bool] = (True,),
    given: Mapping[str, Any] | None = None,
    without_gradient: Sequence[bool] = (),
    notes: Sequence[str] = (),
    parts: Sequence[Sequence[Batch]] = (),
) -> Verdict:
    """Train ``model`` in each number of ``stages``, and its copy ``whole``, on ``batches`` in each mode.

    True is the training mode. ``given`` are arguments of ``NxDPPModel``. Modes in ``without_gradient`` compare the loss
    alone. ``notes`` are repeated in the verdict of a right model, before ``given``. ``parts`` are the microbatches of
    each batch, by default equal ones. A model that ``whole`` cannot train either does not build.
    """
    without_randomness(model)
    without_randomness(whole)
    without_cache(whole)
    given, how = dict(given or {}), list(notes)
    parts = parts or list(map(microbatches_of, batches))
    worst, received, assumed = 0.0, "", False
    for count in stages:
        try:
            pipeline = InProcessPipeline(model, count, **given)
            assumed = assumed or pipeline.partition.assumed
            for training in modes:
                model.train(training)
                whole.train(training)
                for batch, own in zip(batches, parts, strict=True):
                    with torch.set_grad_enabled(training not in without_gradient):
                        worst = max(worst, distance(pipeline, model, whole, dict(batch), MICROBATCHES, own))
            received = _received(pipeline, parts[0][0])
        except Exception as error:
            if (fault := _own_fault(whole, [own[0] for own in parts])) is not None:
                return Verdict("does not build", fault)
            result = "refused" if is_refusal(error) else "failing"
            return Verdict(result, f"{count} stages: {type(error).__name__}: {error}")
    how += [f"{name}={value}" for name, value in given.items()]
    if assumed:
        how.append("traced at the first step")
    if worst == 0:
        return Verdict("exact", "; ".join(how), received)
    result = "to rounding" if worst < ROUNDING else "WRONG"
    return Verdict(result, "; ".join([f"{worst:.1e}", *how]), received)


def without_randomness(model: torch.nn.Module) -> None:
    """Turn off dropout: two runs draw different numbers."""
    for module in model.modules():
        name = type(module).__name__
        rates = ["dropout_prob"]
        if "drop" in name.lower() or name == "StochasticDepth":
            rates += ["p", "drop_prob", "drop_rate"]
        for rate in rates:
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)


def microbatches_of(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Each tensor of ``batch`` in equal parts: rows of a batch have as many values and as many images each."""
    parts = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(MICROBATCHES)]


def is_refusal(error: Exception) -> bool:
    """Return whether a ``raise`` of the package ended in ``error``, of a type for deliberate errors."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or type(error) not in (TracingError, ValueError, TypeError, RuntimeError):
        return False
    code = last.tb_frame.f_code
    return f"{os.sep}nxdpp{os.sep}" in code.co_filename and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _own_fault(whole: Any, microbatches: Sequence[Batch]) -> str | None:
    """The error of the unwrapped model, if it cannot train on ``microbatches`` by itself."""
    try:
        for microbatch in microbatches:
            loss = loss_of(whole(**microbatch))
            if not isinstance(loss, torch.Tensor):
                return "its forward returns no loss"
            loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _received(pipeline: InProcessPipeline, microbatch: Batch) -> str:
    _, plans = pipeline.loss_plans(microbatch)
    return " ".join(str(len(plan.received)) for plan in plans[1:])


def without_cache(model: Any) -> None:
    """Turn off key-value caches."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
