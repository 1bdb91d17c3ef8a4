"""Notes on errors of torch and Python behind which there is often one mistake with a pipelined model.

A note follows the traceback of an error that ends the program::

    run_train(...).backward()         element 0 of tensors does not require grad and does not have a grad_fn
    run_eval(...).backward()          the same
    loss.item() before the last rank  'NoneType' object has no attribute 'item'
    AdamW([trained parameters])       optimizer got an empty parameter list
    DataParallel(model).run_train()   'DataParallel' object has no attribute 'run_train'
"""

import sys
from traceback import walk_tb
from types import FrameType, TracebackType

import torch
from torch import nn

from nxdpp.ranks.faults.board import TRAINING_STEPS, board

_RAN_BACKWARD = (
    "{} has run the backward of all microbatches, and the loss that it returns is detached. Leave loss.backward() out: "
    "the gradients are in .grad"
)
_NO_BACKWARD = (
    "{} computes no gradients, and the loss that it returns is detached. Train with {}, which runs the backward too"
)
_EVALUATIONS = {"run_eval": "run_train", "eval_samples": "train_samples", "eval_microbatches": "train_microbatches"}
"""Calls that compute no gradients, and those that do."""
_NO_LOSS = (
    "if None is a loss or an output: only the rank of the last stage has it (if model.holds_last_stage). "
    "NxDPPModel(..., broadcast_and_average_loss=True) returns the loss on every rank"
)
_EMPTY = "optimizer got an empty parameter list"
_LIBRARIES = ("nxdpp", "torch", "transformers")

_is_installed = False


def install() -> None:
    """Let ``sys.excepthook`` add notes to the errors that it prints, from now on."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    previous = sys.excepthook

    def print_with_note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        add_note(error)
        previous(kind, error, trace)

    sys.excepthook = print_with_note


def add_note(error: BaseException) -> None:
    """Add a note to ``error`` if it looks like a frequent mistake with a pipelined model."""
    found = _note(error)
    if found is not None:
        note = f"nxdpp: {found}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _note(error: BaseException) -> str | None:
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
        return _of_outer_module(error.obj, error.name)
    if isinstance(error, ValueError) and str(error) == _EMPTY:
        return _of_empty_list(error)
    if not any(map(board.calls_of, (*TRAINING_STEPS, *_EVALUATIONS))):
        return None
    if isinstance(error, RuntimeError) and "does not require grad and does not have a grad_fn" in str(error):
        return _of_backward()
    if isinstance(error, AttributeError) and error.obj is None and hasattr(torch.Tensor, error.name or " "):
        return _of_backward() if error.name == "backward" else _of_lacking_loss()
    if isinstance(error, TypeError) and "NoneType" in str(error) and _is_of_program(error):
        return _of_lacking_loss()
    return None


def _of_backward() -> str:
    """Note on ``backward()`` of a loss, which the last call has most likely returned."""
    last = board.position().last.partition(" ")[0]
    if last in _EVALUATIONS:
        return _NO_BACKWARD.format(last, _EVALUATIONS[last])
    return _RAN_BACKWARD.format(next((each for each in (last, *TRAINING_STEPS) if board.calls_of(each)), "run_train"))


def _of_outer_module(outer: nn.Module, name: str | None) -> str | None:
    """Note on a method of a pipelined model that is asked of a module around it."""
    inner = getattr(outer, "module", None)
    if not hasattr(type(inner), "run_train") or not hasattr(type(inner), name or " "):
        return None
    return (
        f"a {type(outer).__name__} is around the pipelined model. Leave it out, and call {name} of the model itself: "
        f"run_train averages the gradients over the data-parallel replicas"
    )


def _of_empty_list(error: ValueError) -> str | None:
    """Note on an optimizer over chosen parameters, of which this rank has none."""
    if len(board.members.get("pipeline", ())) < 2:
        return None
    made = type(_last_frame(error).f_locals.get("self")).__name__
    return (
        f"this rank has layers without such a parameter, as frozen ones, and an optimizer takes a group that is empty. "
        f'Write on every rank: {made}([{{"params": [p for p in model.parameters() if p.requires_grad]}}], ...)'
    )


def _of_lacking_loss() -> str | None:
    return _NO_LOSS if len(board.members.get("pipeline", ())) > 1 else None


def _is_of_program(error: BaseException) -> bool:
    """Return whether ``error`` was raised in code that is of no library known here."""
    return _last_frame(error).f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES


def _last_frame(error: BaseException) -> FrameType:
    """Return the frame that raised ``error``."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame
