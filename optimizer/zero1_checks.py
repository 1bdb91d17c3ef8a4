"""Checks of the arguments and of the parameters of ``Zero1Optimizer``."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


def check_dtypes(**dtypes: torch.dtype | None) -> None:
    """Raise ``ValueError`` for an argument, by name, that is no floating dtype."""
    for name, dtype in dtypes.items():
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating dtype such as torch.float32, not {dtype}.")


def check_reduction(reduction: str) -> None:
    """Raise ``ValueError`` for another word than ``"mean"`` and ``"sum"``."""
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction={reduction!r} must be 'mean', the average over the data-parallel replicas, or 'sum'."
        )


def checked_norm(max_norm: float) -> float:
    """Return ``max_norm`` as a number. Raises ``ValueError`` unless it is above 0."""
    number = float(max_norm)
    if not number > 0:
        raise ValueError(f"max_norm must be above 0, not {max_norm}. grad_clipping=False does not clip.")
    return number


def check_distinct(parameters: Sequence[nn.Parameter]) -> None:
    """Raise ``ValueError`` for a parameter that a group has twice."""
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError("a group has a parameter twice, which would be stepped twice: leave one of them out.")


def refuse_meta(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ``RuntimeError`` for parameters without values."""
    if any(parameter.is_meta for parameter in parameters):
        raise RuntimeError(
            "parameters on the meta device have no values to shard: make the optimizer after move_model_to_device()."
        )


def refuse_sparse(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ``ValueError`` for parameters with sparse gradients."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which cannot be averaged in "
                f"buckets: build its embedding with sparse=False"
            )
