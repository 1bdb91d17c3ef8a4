"""Optimizers that step in the backward of a pipelined model, such as in a hook that each parameter has.

One process has run no later microbatch by then. A pipeline has, and its gradient is not whole before the end of a step.
"""

from functools import cache

from torch.optim import Optimizer

from nxdpp.gradients.replaced_parameters import parameters_of
from nxdpp.gradients.step_hooks import run_before_steps
from nxdpp.ground.torch_names import ENGINE
from nxdpp.pipeline.local.changes import parameters_of_all_models
from nxdpp.tracing.code.frames import caller
from nxdpp.tracing.graph.errors import calling_frame, model_line, stack_line


@cache
def refuse_steps_in_backward() -> None:
    """Make the step of an optimizer raise ``RuntimeError`` in a backward of a pipelined model."""
    run_before_steps(_check)


def _check(optimizer: Optimizer) -> None:
    if not _is_in_backward():
        return
    known = set(map(id, parameters_of_all_models()))
    if any(id(parameter) in known for parameter in parameters_of(optimizer)):
        frame = calling_frame(caller(1))
        raise RuntimeError(
            f"an optimizer, {type(optimizer).__name__}, steps in the backward of a microbatch\n"
            f"  at {model_line(frame and stack_line(frame))}\n"
            f"Forwards of later microbatches have run with the weights from before, and the gradient of the step is "
            f"whole only after run_train. That holds for num_microbatches=1 too: tied weights, replicas and tensor "
            f"ranks add their gradients after the backward. Remove the hook, and call optimizer.step() and "
            f"optimizer.zero_grad() after run_train."
        )


def _is_in_backward() -> bool:
    try:
        # It takes a call only while a backward runs in this thread.
        ENGINE.found.queue_callback(_nothing)
    except RuntimeError:
        return False
    return True


def _nothing() -> None: ...
