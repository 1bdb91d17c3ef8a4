"""Samples of a step: microbatches as the caller gives them, which are not split."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.pipeline.microbatches.rows import check_kinds
from nxdpp.tracing.input_dicts import InputDict, open_inputs

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
            f"a step of this pipeline has num_microbatches={microbatches}, and was given {len(samples)} samples. Give "
            f"{microbatches} of them."
        )


def opened_samples(samples: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Return the opened inputs of each sample.

    Raises:
        TypeError: for values of other kinds than tensors, numbers, strings, ``None``, and containers of them.
        ValueError: for other structures, numbers of dimensions or dtypes than the first sample has.
    """
    opened = [open_inputs(sample, all_kinds=True) for sample in samples]
    first = _described(opened[0])
    for number, sample in enumerate(opened):
        check_kinds(sample, device, _ADVICE)
        described = _described(sample)
        if described != first:
            name = next(name for name in {**first, **described} if first.get(name) != described.get(name))
            there, here = (each.get(name, f"no {name}") for each in (first, described))
            raise ValueError(
                f"samples 0 and {number} differ in {name}: {there} and {here}. Give all samples of a step the same "
                f"structure, numbers of dimensions and dtypes. Only sizes may differ."
            )
    return opened


def _described(sample: Mapping[str, Any]) -> dict[str, str]:
    """Words for each value: dimensions and dtype of a tensor, keys of a container, the type of another value."""
    return {name: _description(value) for name, value in sample.items()}


def _description(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.ndim} dimensions, {value.dtype}"
    if isinstance(value, InputDict):
        return f"a {value.kind.__name__} of {[key for key, _ in value.names]}"
    return type(value).__name__
