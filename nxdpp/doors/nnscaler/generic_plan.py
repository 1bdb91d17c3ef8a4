"""Tensor plan of any module: its linear layers and embeddings are divided, and the results gathered.

::

    nn.Linear      colwise_gather_output   each rank computes some of the features
    nn.Embedding   embedding_rowwise       each rank has some of the rows

Transformers models inside the module keep the plans of their types. The plan of a module is always compared with one
process before it is used.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxdpp.doors.nnscaler.nested_values import map_values, values_in
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import broadcast_value
from nxdpp.tensor.models.comparison import check_tensor_parallel
from nxdpp.tensor.models.own_plans import tensor_plan


def plan_for(module: nn.Module, ranks: int) -> dict[str, str] | None:
    """Return a plan that divides ``module`` over ``ranks``, or ``None`` if nxdpp has one for its type.

    Raises ``ValueError`` for a module of which nothing can be divided.
    """
    if tensor_plan(module) is not None:
        return None
    plan = dict(_styles(module, "", ranks))
    if not plan:
        raise ValueError(
            f"{type(module).__name__} has no nn.Linear or nn.Embedding that {ranks} ranks can share: use dp with "
            f"plan_ngpus=1, or a policy function"
        )
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
    except (RuntimeError, TypeError, ValueError) as error:
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
