"""Batches of an evaluation, split by rows into samples, and the joined outputs of these."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def split(inputs: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Split the tensors ``(B, ...)`` of ``inputs`` along dimension 0 into ``number`` samples of equal rows.

    Tensors of first dimension 1 beside larger ones, of no dimension, and values that are no tensors go to each sample.

    Raises:
        ValueError: for rows that do not divide, and for tensors of different rows.
        TypeError: for tensors inside of other values.
    """
    if number == 1:
        return [dict(inputs)]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    for name, value in inputs.items():
        if name not in tensors and any(
            isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in pytree.tree_leaves(value)
        ):
            raise TypeError(f"{name} holds tensors in a {type(value).__name__}: give tensors, or num_microbatches=1")
    rows = max((tensor.shape[0] for tensor in tensors.values()), default=1)
    if rows % number:
        raise ValueError(f"the batch has {rows} rows, which do not divide into num_microbatches={number}")
    for name, tensor in tensors.items():
        if tensor.shape[0] not in (1, rows):
            raise ValueError(f"{name} has {tensor.shape[0]} rows, and the batch has {rows}")
    split_ones = {name: tensor.chunk(number) for name, tensor in tensors.items() if tensor.shape[0] == rows}
    return [
        {name: split_ones[name][index] if name in split_ones else value for name, value in inputs.items()}
        for index in range(number)
    ]


def join(outputs: Sequence[Any]) -> Any:
    """Join the outputs of samples: losses to their mean, other tensors along dimension 0."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = [_joined(values) for values in zip(*(each for each, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    return torch.cat(list(values)) if values[0].dim() else torch.stack(list(values)).mean()
