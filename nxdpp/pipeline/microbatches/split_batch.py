"""Microbatches of a step: a batch split by rows, by images or by a function of the user, or samples as they are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.counted import counted
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension, dimensions_of, rows_first, rows_of
from nxdpp.pipeline.microbatches.rows import check_batch, check_kinds, check_not_shared, split_inputs
from nxdpp.pipeline.microbatches.sequence_first import check_not_sequence_first
from nxdpp.tracing.models.image_rows import split_images
from nxdpp.tracing.values.input_dicts import levels, open_inputs

SplitInputs = Callable[[dict[str, Any], int], Sequence[Mapping[str, Any]]]
"""A function of the inputs and the number of microbatches. It returns the inputs of each microbatch."""


def split_batch(
    module: nn.Module,
    inputs: Mapping[str, Any],
    microbatches: int,
    function: SplitInputs | None,
    device: torch.device,
    shared: Collection[str] | None = None,
    of_rows: set[str] | None = None,
    batch_dimension: BatchDimension | None = None,
    rows_along_0: set[str] | None = None,
    is_uneven: bool = False,
) -> tuple[list[dict[str, Any]], bool]:
    """Return the opened inputs of each microbatch, and whether all have the same shapes for certain.

    Args:
        module: the model. Images of a transformers model go with their rows.
        inputs: the model's inputs by name. The values of a dict among them are split like inputs of their own.
        microbatches: number of microbatches.
        function: splits the inputs in place of the rules.
        device: device of this rank's stages.
        shared: names of inputs that go whole to each microbatch. ``None`` refuses tensors that may be such, except for
            a transformers model, whose inputs have a part for each row.
        of_rows: names that have a part for each row, as earlier batches have shown. Those that this one shows are
            added.
        batch_dimension: the dimension of the rows, 0 by default. ``None`` refuses inputs that a module may take with
            the sequence first.
        rows_along_0: names that have their rows along dimension 0, as ``of_rows``.
        is_uneven: some microbatches may have a row more than others.

    Raises:
        ValueError, TypeError: for inputs that cannot be split, and for a result of ``function`` that is no list of
            ``microbatches`` dicts.
    """
    if function is not None:
        check_kinds(open_inputs(inputs), device)
        return _checked(function(dict(inputs), microbatches), microbatches, device), False
    inputs = open_inputs(inputs)
    check_kinds(inputs, device)
    images = _split_images(module, inputs, microbatches)
    of_images = {name for part in images for name in part}
    rest = {name: value for name, value in inputs.items() if name not in of_images}
    along = dimensions_of(rest, batch_dimension)
    turned = rows_first(rest, along)
    place = "their batch_dimension" if isinstance(batch_dimension, Mapping) else f"dimension {batch_dimension or 0}"
    if batch_dimension is None and rows_of(rest, None, shared) is not None:
        own = {name: value for name, value in rest.items() if name not in (shared or ())}
        check_not_sequence_first(module, own, microbatches, set() if rows_along_0 is None else rows_along_0)
    check_batch(turned, microbatches, shared or (), place, is_uneven)
    if shared is None and not isinstance(module, PreTrainedModel):
        check_not_shared(turned, microbatches, set() if of_rows is None else of_rows)
    parts = split_inputs(rest, microbatches, shared or (), along)
    return [part | own for part, own in zip(parts, images, strict=True)], not of_images and not is_uneven


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
        raise ValueError(
            f"split_inputs_fn returned {counted(len(parts), 'microbatch')}; num_microbatches is {microbatches}."
        )
    opened = [open_inputs(part) for part in parts]
    for part in opened:
        check_kinds(part, device)
    return opened


_ADVICE = (
    "a sample has tensors, None, numbers, strings, booleans, and dicts, lists, tuples, named tuples and dataclasses of "
    "these. Make it one of them."
)


def check_samples(samples: Any, microbatches: int) -> None:
    """Raise ``TypeError`` unless ``samples`` is a list, and ``ValueError`` unless it has ``microbatches`` samples."""
    if isinstance(samples, str | bytes) or not isinstance(samples, Sequence):
        raise TypeError(f"the samples must be a list of the inputs of each microbatch, not {samples!r:.80}.")
    if len(samples) != microbatches:
        raise ValueError(
            f"a step of this pipeline has num_microbatches={microbatches}, and was given "
            f"{counted(len(samples), 'sample')}. Give {microbatches} of them."
        )


def opened_samples(samples: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Return the opened inputs of each sample.

    Raises ``TypeError`` for values that are not tensors, numbers, strings, ``None``, or containers of them.
    """
    opened = [open_inputs(sample, all_kinds=True) for sample in samples]
    for sample in opened:
        check_kinds(sample, device, _ADVICE)
    return opened
