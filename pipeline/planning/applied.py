"""Checks of a plan that is applied to a model: the job and the model are those that it was made for."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from nxdpp.parallel_layers import parallel_state

if TYPE_CHECKING:
    from nxdpp.pipeline.planning.plan import Plan

# Arguments of a layout: a plan chooses them, if only by their defaults.
_OF_PLANS = frozenset(
    {
        "auto_partition",
        "num_microbatches",
        "partition",
        "pipeline_cuts",
        "schedule",
        "use_zero1_optimizer",
        "virtual_pipeline_size",
    }
)


def arguments_of(plan: "Plan", module: nn.Module, others: Collection[str]) -> dict[str, Any]:
    """Return the arguments of ``NxDPPModel`` that ``plan`` chooses for ``module``; not collective.

    Raises ``ValueError`` if ``others``, the names of a caller's arguments, has one of them. Also for other sizes of the
    job, and another class or dtype of the model, than the plan's.
    """
    chosen = plan.arguments()
    if twice := sorted((chosen.keys() | _OF_PLANS) & set(others)):
        raise ValueError(f"the plan chooses {', '.join(twice)}: leave it out, or call NxDPPModel yourself.")
    plan.check_model(module)
    layout = plan.layout
    wanted = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    found = {
        "tensor": parallel_state.get_tensor_model_parallel_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_size(),
        "data": parallel_state.get_data_parallel_size(),
    }
    if found != wanted:
        raise ValueError(
            f"the plan is for {wanted}, and the job has {found}. Start it on {plan.devices} devices and call "
            f"plan.initialize()."
        )
    return chosen
