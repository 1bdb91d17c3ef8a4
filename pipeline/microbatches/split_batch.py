"""Split of a step's batch into microbatches: by rows, by images, or by a function of the user."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.microbatches.images import split_images
from nxdpp.pipeline.microbatches.rows import check_batch, check_kinds, split_inputs
from nxdpp.tracing.input_dicts import levels, open_inputs

SplitInputs = Callable[[dict[str, Any], int], Sequence[Mapping[str, Any]]]
"""A function of the inputs and the number of microbatches. It returns the inputs of each microbatch."""


def split_batch(
    module: nn.Module, inputs: Mapping[str, Any], microbatches: int, function: SplitInputs | None, device: torch.device
) -> tuple[list[dict[str, Any]], bool]:
    """Return the opened inputs of each microbatch, and whether all have the same shapes for certain.

    Args:
        module: the model. Images of a transformers model go with their rows.
        inputs: the model's inputs by name. The values of a dict among them are split like inputs of their own.
        microbatches: number of microbatches.
        function: splits the inputs in place of the rules.
        device: device of this rank's stages.

    Raises:
        ValueError, TypeError: for inputs that cannot be split, and for a result of ``function`` that is no list of
            ``microbatches`` dicts of the same names.
    """
    if function is not None:
        check_kinds(open_inputs(inputs), device)
        return _checked(function(dict(inputs), microbatches), microbatches, device), False
    inputs = open_inputs(inputs)
    check_kinds(inputs, device)
    images = _split_images(module, inputs, microbatches)
    rest = {name: value for name, value in inputs.items() if name not in images[0]}
    check_batch(rest, microbatches)
    parts = [part | own for part, own in zip(split_inputs(rest, microbatches), images, strict=True)]
    return parts, not images[0]


def _split_images(module: nn.Module, inputs: Mapping[str, Any], microbatches: int) -> list[dict[str, Any]]:
    """Return the images of each microbatch. Images and tokens are in one dict, or are both inputs of their own."""
    images: list[dict[str, Any]] = [{} for _ in range(microbatches)]
    for names in levels(inputs):
        parts = split_images(module, {key: inputs[name] for key, name in names.items()}, microbatches)
        for of_all, part in zip(images, parts, strict=True):
            of_all |= {names[key]: value for key, value in part.items()}
    return images


def _checked(parts: Any, microbatches: int, device: torch.device) -> list[dict[str, Any]]:
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
        raise TypeError(f"split_inputs_fn must return a list of dicts, one for each microbatch, not {parts!r:.80}.")
    if len(parts) != microbatches:
        raise ValueError(f"split_inputs_fn returned {len(parts)} microbatches; num_microbatches is {microbatches}.")
    opened = [open_inputs(part) for part in parts]
    for number, part in enumerate(opened):
        if set(part) != set(opened[0]):
            raise ValueError(
                f"split_inputs_fn gave microbatch {number} the inputs {sorted(part)}, and microbatch 0 "
                f"{sorted(opened[0])}. Give all the same names."
            )
        check_kinds(part, device)
    return opened
