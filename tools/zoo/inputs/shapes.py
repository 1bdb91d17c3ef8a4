"""Sizes of the batches, and what all kinds of inputs share."""

import inspect

import torch
from torch import Tensor, nn

# Rows, tokens (or source tokens), target tokens.
SHAPES = ((4, 16, 8), (8, 24, 16), (4, 32, 24))
PADDED = 1


def taken(model: nn.Module) -> frozenset[str]:
    """The names of the arguments of ``model``'s forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def padding(rows: int, length: int) -> Tensor:
    """(rows, length) of int64: row 0 is full, each next row one token shorter, with a period of four rows."""
    ends = length - torch.arange(rows) % 4
    return (torch.arange(length) < ends[:, None]).long()


def no_labels(model: nn.Module) -> ValueError:
    """The error for a model whose forward computes no loss."""
    return ValueError(f"{type(model).__name__}.forward takes no labels.")
