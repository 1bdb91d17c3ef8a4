"""torch's ``GradScaler`` over a pipelined model: it divides gradients by a scale that their loss was never given.

::

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
from nxdpp.pipeline.local.changes import parameters_of_all_models
from nxdpp.tracing.code.frames import Frame, caller, file_of, outwards, variable

# GradScaler.step, the call of the step in it, and wrappers of torch around an optimizer's step.
_FRAMES = 8
_FILE = torch.amp.GradScaler.step.__code__.co_filename


@cache
def refuse_scaler_of_torch() -> None:
    """Make the step of an optimizer of a pipelined model raise ``RuntimeError`` in ``step`` of torch's scaler."""
    run_before_steps(_check)


def _check(optimizer: Optimizer) -> None:
    scaler = _calling_scaler(caller(1))
    if scaler is None:
        return
    known = set(map(id, parameters_of_all_models()))
    if any(id(parameter) in known for parameter in parameters_of(optimizer)):
        raise RuntimeError(
            f"torch's GradScaler has divided the gradients of {type(optimizer).__name__} by its scale of "
            f"{scaler.get_scale():g}, and run_train computed them from the loss itself. Make "
            f"scaler = nxdpp.GradScaler(), give it to NxDPPModel(..., grad_scaler=scaler), and leave "
            f"scaler.scale(loss).backward() out; scaler.step(optimizer) and scaler.update() stay."
        )


def _calling_scaler(frame: Frame) -> torch.amp.GradScaler | None:
    for each in islice(outwards(frame), _FRAMES):
        # A look at the variables of the program's own frames would keep its tensors alive.
        found = variable(each, "self") if file_of(each) == _FILE else None
        if isinstance(found, torch.amp.GradScaler):
            return None if isinstance(found, GradScaler) or not found.is_enabled() else found
    return None
