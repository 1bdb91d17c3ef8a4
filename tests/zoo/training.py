"""Training sweep: each type is cut in two and in four, trained, and compared with the unwrapped model.

A tiny model with random weights is traced on the meta device and on the CPU. Its stages run in one process, in train
and in eval mode, on three shapes, one of them padded. Loss and every gradient are compared. A type is

- exact: equal to the last bit, except for the gradient of a tied weight, a sum in another order;
- to rounding: the difference of each gradient is below 1e-5 of its greatest value. Gradients below a thousandth of the
  model's greatest are compared with that: an attention's key bias has a gradient of zero, apart from rounding;
- refused: our error names the construct, its file and line;
- failing: another error;
- WRONG: anything else.
"""

import copy
import os
import re
import traceback
from typing import Any

import torch

from nxdpp.pipeline.microbatch import split_inputs
from nxdpp.tracing.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance
from tests.zoo import ARGUMENTS, NO_GRADIENT_IN_EVAL, NOTES, SHAPES, build, inputs
from tests.zoo.sweep import Verdict

MICROBATCHES = 4
ROUNDING = 1e-5


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type with its unwrapped model."""
    model = build(task, model_type)
    whole = _without_cache(copy.deepcopy(model))
    worst, received = 0.0, ""
    given: dict[str, Any] = ARGUMENTS.get(model_type, {})
    for stages in (2, 4):
        try:
            InProcessPipeline(build(task, model_type, "meta"), stages, **given)
            pipeline = InProcessPipeline(model, stages, **given)
            for training in (True, False):
                model.train(training)
                whole.train(training)
                for shape in range(len(SHAPES)):
                    with torch.set_grad_enabled(training or model_type not in NO_GRADIENT_IN_EVAL):
                        off = distance(pipeline, model, whole, inputs(task, model, shape), MICROBATCHES)
                    worst = max(worst, off)
            received = _received(pipeline, inputs(task, model, 0))
        except Exception as error:
            result = "refused" if is_refusal(error) else "failing"
            return Verdict(result, f"{stages} stages: {type(error).__name__}: {error}")
    how = [NOTES[model_type]] if model_type in NOTES else []
    how += [f"{name}={value}" for name, value in given.items()]
    if worst == 0:
        return Verdict("exact", "; ".join(how), received)
    result = "to rounding" if worst < ROUNDING else "WRONG"
    return Verdict(result, "; ".join([f"{worst:.1e}", *how]), received)


def _received(pipeline: InProcessPipeline, batch: dict[str, torch.Tensor]) -> str:
    _, plans = pipeline.loss_plans(split_inputs(batch, MICROBATCHES)[0])
    return " ".join(str(len(plan.received)) for plan in plans[1:])


def is_refusal(error: Exception) -> bool:
    """Return whether ``error`` is a deliberate error of ours that names a file and a line."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = type(error) in (TracingError, ValueError, RuntimeError) and f"{os.sep}nxdpp{os.sep}" in raised_in
    return is_ours and re.search(r"\.py:\d+", str(error)) is not None


def _without_cache(model: Any) -> Any:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    return model
