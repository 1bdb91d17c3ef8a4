"""The plan that ``tensor_parallelize`` takes by default, asked without ranks and without a change."""

from collections.abc import Mapping

from torch import nn

from nxdpp.tensor_parallel.adapters import adapted_plan, base_of
from nxdpp.tensor_parallel.compared_types import COMPARED, is_compared
from nxdpp.tensor_parallel.own_plans import plan_of
from nxdpp.tensor_parallel.type_plans import PLANS


def tensor_plan(model: nn.Module) -> dict[str, str] | None:
    """Return the style of each module by name pattern that ``tensor_parallelize`` takes for ``model`` by default.

    ``None`` for a model that it refuses without ``plan=``. Needs no ranks, and does not look at sizes.
    """
    base = base_of(model)
    plan = plan_of(base)
    if not plan:
        return None
    if base is not model:
        plan = adapted_plan(model, plan)
    return plan if has_compared_plan(model, plan) else None


def has_compared_plan(model: nn.Module, plan: Mapping[str, str]) -> bool:
    """Return whether ``plan``, the default of ``model``, was compared with one process."""
    base = base_of(model)
    model_type = getattr(getattr(base, "config", None), "model_type", None)
    has_own_plan = model_type in PLANS and base is model
    return has_own_plan or type(base).__name__ in COMPARED or is_compared(type(model), plan)
