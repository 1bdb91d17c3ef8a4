"""Steps of a pipelined model's optimizers that train wrong numbers: in its backward, and by torch's ``GradScaler``.

An optimizer may step in a hook that each parameter has. One process has run no later microbatch by then. A pipeline
has, and its gradient is not whole before the end of a step. torch's scaler divides gradients by a scale that their loss
was never given::

    scaler.scale(loss).backward()     left out: run_train has run the backward, at the loss itself
    scaler.step(optimizer)            divides .grad by 65,536, and steps

Each rank would also judge by the gradients of its own stages whether to leave the step out.
"""

from functools import cache
from itertools import islice

import torch
from torch.optim import Optimizer

from nxdpp.gradients.grad_scaler import GradScaler
from nxdpp.gradients.replaced_parameters import parameters_of
from nxdpp.gradients.step_hooks import run_before_steps
from nxdpp.ground.torch_names import ENGINE
from nxdpp.pipeline.local.changes import parameters_of_all_models
from nxdpp.tracing.code.frames import Frame, caller, file_of, outwards, variable
from nxdpp.tracing.graph.errors import calling_frame, model_line, stack_line

# GradScaler.step, the call of the step in it, and wrappers of torch around an optimizer's step.
_FRAMES = 8
_FILE = torch.amp.GradScaler.step.__code__.co_filename


@cache
def refuse_wrong_steps() -> None:
    """Make such a step of an optimizer of a pipelined model raise ``RuntimeError``."""
    run_before_steps(_check)


def _check(optimizer: Optimizer) -> None:
    is_in_backward, scaler = _is_in_backward(), _calling_scaler(caller(1))
    if not is_in_backward and scaler is None:
        return
    known = set(map(id, parameters_of_all_models()))
    if not any(id(parameter) in known for parameter in parameters_of(optimizer)):
        return
    if is_in_backward:
        frame = calling_frame(caller(1))
        raise RuntimeError(
            f"an optimizer, {type(optimizer).__name__}, steps in the backward of a microbatch\n"
            f"  at {model_line(frame and stack_line(frame))}\n"
            f"Forwards of later microbatches have run with the weights from before, and the gradient of the step is "
            f"whole only after run_train. That holds for num_microbatches=1 too: tied weights, replicas and tensor "
            f"ranks add their gradients after the backward. Remove the hook, and call optimizer.step() and "
            f"optimizer.zero_grad() after run_train."
        )
    if scaler is not None:
        raise RuntimeError(
            f"torch's GradScaler has divided the gradients of {type(optimizer).__name__} by its scale of "
            f"{scaler.get_scale():g}, and run_train computed them from the loss itself. Make "
            f"scaler = nxdpp.GradScaler(), give it to NxDPPModel(..., grad_scaler=scaler), and leave "
            f"scaler.scale(loss).backward() out; scaler.step(optimizer) and scaler.update() stay."
        )


def _is_in_backward() -> bool:
    try:
        # It takes a call only while a backward runs in this thread.
        ENGINE.found.queue_callback(lambda: None)
    except RuntimeError:
        return False
    return True


def _calling_scaler(frame: Frame) -> torch.amp.GradScaler | None:
    for each in islice(outwards(frame), _FRAMES):
        # A look at the variables of the program's own frames would keep its tensors alive.
        found = variable(each, "self") if file_of(each) == _FILE else None
        if isinstance(found, torch.amp.GradScaler):
            return None if isinstance(found, GradScaler) or not found.is_enabled() else found
    return None
