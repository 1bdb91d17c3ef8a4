"""Training sweep: each type is cut in two and in four, trained, and compared with the unwrapped model.

A tiny model with random weights is traced on the meta device and on the CPU. Its stages run in one process, in train
and in eval mode, on three shapes, one of them padded. A task that is not thorough is cut in three, on the CPU, and runs
in train mode on two shapes. Loss and every gradient are compared. A type is

- exact: equal to the last bit, except for the gradient of a tied weight, a sum in another order;
- to rounding: the difference of each gradient is below 1e-5 of its greatest value. Gradients below a thousandth of the
  model's greatest are compared with that: an attention's key bias has a gradient of zero, apart from rounding;
- refused: our error names the construct, its file and line;
- failing: another error;
- WRONG: anything else.
"""

import copy
from typing import Any

from tests.support.in_process import InProcessPipeline
from tools.zoo import ARGUMENTS, NO_GRADIENT_IN_EVAL, NOTES, SHAPES, TASKS, build, inputs
from tools.zoo.comparison import compare, is_refusal
from tools.zoo.sweep import Verdict
from tools.zoo.with_loss import with_loss


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type with its unwrapped model."""
    thorough = TASKS[task].thorough
    try:
        bare = build(task, model_type)
        batches = [inputs(task, bare, shape) for shape in range(len(SHAPES) if thorough else 2)]
    except Exception as error:
        if thorough:
            raise
        return Verdict("does not build", f"{type(error).__name__}: {error}")
    given: dict[str, Any] = ARGUMENTS.get(model_type, {})
    if thorough:
        try:
            InProcessPipeline(build(task, model_type, "meta"), 2, **given)
        except Exception as error:
            return Verdict("refused" if is_refusal(error) else "failing", f"{type(error).__name__}: {error}")
    notes = [NOTES[model_type]] if model_type in NOTES else []
    modes = (True, False) if thorough else (True,)
    without_gradient = (False,) if model_type in NO_GRADIENT_IN_EVAL else ()
    stages = (2, 4) if thorough else (3,)
    model = with_loss(task, bare)
    return compare(model, copy.deepcopy(model), batches, stages, modes, given, without_gradient, notes)
