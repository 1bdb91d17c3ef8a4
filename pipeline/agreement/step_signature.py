"""Signature of a step, and the difference of two for a message."""

from typing import NamedTuple

import torch


class StepSignature(NamedTuple):
    """Shapes and dtypes of a microbatch's inputs, the autocast of the device, and ``True`` for a training step."""

    inputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    autocast: tuple[bool, torch.dtype]
    train: bool


def signature_differences(theirs: StepSignature, ours: StepSignature) -> list[tuple[str, str]]:
    """Texts of what two signatures differ in, those of ``theirs`` first."""
    pairs = [(_call(theirs), _call(ours)), (_autocast(theirs), _autocast(ours))]
    there, here = ({name: f"{name} {shape} {dtype}" for name, shape, dtype in each.inputs} for each in (theirs, ours))
    pairs += [(there.get(name, f"no {name}"), here.get(name, f"no {name}")) for name in {**there, **here}]
    return [pair for pair in pairs if pair[0] != pair[1]]


def _call(signature: StepSignature) -> str:
    return "run_train" if signature.train else "run_eval"


def _autocast(signature: StepSignature) -> str:
    is_enabled, dtype = signature.autocast
    return f"autocast to {dtype}" if is_enabled else "no autocast"
