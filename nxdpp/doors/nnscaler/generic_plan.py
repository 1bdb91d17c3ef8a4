"""Tensor plan of any module: its linear layers and embeddings are divided, and the results gathered.

::

                   plan_for                                           rows_plan, of the policy data
    nn.Linear      colwise_gather_output: some of the features        rows: some of the rows of the input
    nn.Embedding   embedding_rowwise: some of the rows
    others         replicated: each rank computes the same, and has the same gradients

Transformers models inside the module keep the plans of their types. A plan is always compared with one process before
it is used. Where it differs, the module is replicated.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nxdpp.doors.nnscaler.nested_values import map_values, values_in
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.group_values import broadcast_value
from nxdpp.tensor.models.comparison import check_tensor_parallel
from nxdpp.tensor.models.own_plans import tensor_plan


def plan_for(module: nn.Module, ranks: int) -> dict[str, str] | None:
    """Return a plan that divides ``module`` over ``ranks``, or ``None`` if nxdpp has one for its type.

    What does not divide is not in it. A module of which nothing divides has an empty plan.
    """
    return None if tensor_plan(module) is not None else dict(_styles(module, "", ranks))


def rows_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan by which ranks share the rows of the inputs of all linear layers."""
    return {name: "rows" for name, part in module.named_modules() if type(part) in (nn.Linear, Conv1D)}


def checked_plan(
    module: nn.Module, dummy_forward_args: Mapping[str, Any], plan: Mapping[str, str], is_default: bool
) -> Mapping[str, str]:
    """Return ``plan`` where it gives the numbers of one process, as ``compare`` does; collective over all ranks.

    Where a plan that ``is_default`` differs in a unit, all ranks warn and return the empty plan, by which each rank
    computes the whole module. Raises ``ValueError`` on all ranks for a plan of the user that differs.
    """
    try:
        Exchange().together(lambda: compare(module, dummy_forward_args, plan))
    except ValueError as error:
        if not is_default:
            raise
        warnings.warn(f"each rank of a unit computes the whole module: {error}", stacklevel=3)
        return {}
    return plan


def compare(module: nn.Module, dummy_forward_args: Mapping[str, Any], plan: Mapping[str, str]) -> None:
    """Compare ``module`` divided by ``plan`` with one process, in float64; collective over the tensor group.

    ``module`` has its values and is not changed. Call it after ``initialize_model_parallel``, before
    ``nxdpp.tensor_parallelize(module, plan)``. ``dummy_forward_args`` take their values from the first rank.

    Raises ``ValueError`` for a plan that gives different numbers, or that the module cannot run.
    """
    device = parallel_state.local_device()
    args = map_values(lambda value: _in_float64(value, device), _of_first_rank(dict(dummy_forward_args)))
    compared = copy.deepcopy(module).to(device)
    for parameter in compared.parameters():
        # Gradients show differences of frozen parts and of modules for inference, too.
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            check_tensor_parallel(compared, args, plan)
    except Exception as error:  # the module's own code may raise anything over a part of a weight
        raise ValueError(
            f"{type(module).__name__} cannot be divided over {parallel_state.get_tensor_model_parallel_size()} ranks: "
            f"{str(error).rstrip('.')}. Use dp with plan_ngpus=1, or a policy function that gives a plan"
        ) from error


def _styles(module: nn.Module, prefix: str, ranks: int) -> list[tuple[str, str]]:
    """Return names and styles of the parts of ``module`` that ``ranks`` can share."""
    if type(module) is nn.Linear:
        return [(prefix, "colwise_gather_output")] if module.out_features % ranks == 0 else []
    if type(module) is nn.Embedding:
        return [(prefix, "embedding_rowwise")] if module.num_embeddings % ranks == 0 else []
    of_type = tensor_plan(module) if prefix else None
    if of_type is not None:
        return [(f"{prefix}.{pattern}", style) for pattern, style in of_type.items()]
    found = []
    for name, child in module.named_children():
        found += _styles(child, f"{prefix}.{name}" if prefix else name, ranks)
    return found


def _of_first_rank(args: dict[str, Any]) -> dict[str, Any]:
    """Return ``args`` with the tensors, numbers and texts of the first tensor-parallel rank; collective."""
    sent = broadcast_value([_sent(value) for value in values_in(args)], parallel_state.get_tensor_control_group())
    if len(sent) != len(values_in(args)):
        raise ValueError("dummy_forward_args have another structure than on the first rank of the unit: give the same")
    values = iter(sent)

    def first_of(own: Any) -> Any:
        value = next(values)
        return value if _has_value(own) else own

    taken: dict[str, Any] = map_values(first_of, args)
    return taken


def _sent(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value if _has_value(value) else None


def _has_value(value: Any) -> bool:
    return isinstance(value, torch.Tensor | bool | int | float | str)


def _in_float64(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, torch.float64 if value.is_floating_point() else value.dtype)
