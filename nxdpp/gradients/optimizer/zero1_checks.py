"""Checks of the arguments and parameters of ``Zero1Optimizer``: its optimizer changes each element by itself."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.gradient_dtype import dense
from nxdpp.gradients.optimizer.known_optimizers import Unknown, looked_at
from nxdpp.gradients.shards.local_tensors import is_sharded


def check_dtypes(**dtypes: torch.dtype | None) -> None:
    """Raise ``ValueError`` for an argument, by name, that is no floating dtype."""
    for name, dtype in dtypes.items():
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating dtype such as torch.float32, not {dtype}.")


def check_reduction(reduction: str) -> None:
    """Raise ``ValueError`` for a word other than ``"mean"`` and ``"sum"``."""
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


def refuse_divided(parameters: Sequence[nn.Parameter], groups: int) -> None:
    """Raise ``ValueError`` for parameters of ``fully_shard``, and for experts over ranks with several ``groups``."""
    if groups > 1 and any(map(is_of_experts, parameters)):
        raise ValueError(
            f"sharding_groups={groups} divides the replicas into groups with the whole state, and expert_parallelize "
            f"has given each rank of an expert group experts of its own: leave sharding_groups out."
        )
    if any(map(is_sharded, parameters)):
        raise ValueError(
            "Zero1Optimizer shards the state of whole parameters, and fully_shard has sharded them with their "
            "gradients and state already: take torch's own optimizer, as torch.optim.AdamW(model.local_parameters())."
        )


def refuse_sparse(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ``ValueError`` for parameters with sparse gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            dense(parameter.grad, parameter)


def check_elementwise(optimizer_class: Any, defaults: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the options of a group of ``optimizer_class(params, **defaults)``.

    Raises ``TypeError`` for something other than a class of optimizers, ``ValueError`` for an optimizer that looks at
    more than an element (Adafactor, LBFGS, Muon, LAMB), that is neither known nor declared, or that cannot step flat
    parts of dense parameters.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a class such as torch.optim.AdamW, not {optimizer_class!r:.80}.")
    # Wrong options raise the error of the class.
    optimizer = optimizer_class([nn.Parameter(torch.zeros(2, 2, device=device))], **defaults)
    (group,) = optimizer.param_groups
    looks, name = looked_at(optimizer, group), optimizer_class.__name__
    remedy = f"Take an elementwise optimizer such as torch.optim.AdamW, or use {name} without sharding."
    if isinstance(looks, Unknown):
        raise ValueError(
            f"{name} {looks.reason}, and a rank has only a part of a parameter's elements. If each element's step "
            f"follows from its own value, gradient and state alone, write before: "
            f'nxdpp.declare_optimizer({name}, looks_at="element"). If not: {remedy}'
        )
    if looks != "element":
        raise ValueError(
            f"{name} does not change each element by itself, and a rank has only a part of a parameter's elements: the "
            f"result would depend on the number of ranks. {remedy}"
        )
    if group.get("differentiable") or issubclass(optimizer_class, SparseAdam):
        why = "differentiable=True" if group.get("differentiable") else "sparse gradients"
        raise ValueError(f"{name} takes {why}, and does not step flat parts of dense parameters. {remedy}")
    return dict(optimizer.defaults)
