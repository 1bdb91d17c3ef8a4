"""Policies: the name or the function that chooses how the ranks of a unit divide a module.

=========== =====================================================================================
``dp``      one rank a unit
``data``    all ranks of a unit share the rows of each linear layer
``tp``      all ranks of a unit share each layer
``pp``      a pipeline over all ranks of a unit
``hybrid``  a pipeline of ``pp_size`` ranks; ``plan_ngpus / pp_size`` ranks share each layer
``autodist`` the fastest layout that ``nxdpp.plan`` finds
=========== =====================================================================================
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nxdpp.doors.nnscaler.autodist import SETTINGS, autodist
from nxdpp.doors.nnscaler.compute_config import ComputeConfig, is_whole
from nxdpp.doors.nnscaler.generic_plan import rows_plan
from nxdpp.doors.nnscaler.policy_graph import PolicyGraph
from nxdpp.doors.nnscaler.unit_layout import UnitLayout

Policy = str | Callable[[PolicyGraph, ComputeConfig], PolicyGraph]

_PIPELINE = ("pipeline_nstages", "pipeline_nmicros", "pipeline_scheduler", "pp_size")


def check_policy(policy: Policy) -> None:
    """Raise ``TypeError`` or ``ValueError`` for anything but a function and one of the names."""
    if callable(policy):
        return
    if not isinstance(policy, str):
        raise TypeError(f"pas_policy must be a name or a function (graph, compute_config) -> graph, not {policy!r:.80}")
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}: give one of {', '.join(POLICIES)}, or a function")


def layout_of(
    policy: Policy, module: nn.Module, dummy_forward_args: Mapping[str, Any], compute_config: ComputeConfig
) -> UnitLayout:
    """Return the layout that ``policy`` chooses for ``module``; not collective, and ``module`` is not changed.

    Args:
        policy: one of the six names, or a function that divides a ``PolicyGraph`` and returns it.
        module: the whole module, in the training mode of its steps. Its parameters may be on the meta device.
        dummy_forward_args: values of forward's arguments by name, of one sample.
        compute_config: the ranks and settings.

    Raises:
        ValueError: for an unknown name, a setting that cannot be honoured, and a module that cannot be divided so.
        TypeError: for a policy of the wrong type, and for a function that returns no graph.
        TracingError: for a pipeline of a module that cannot be traced.
    """
    check_policy(policy)
    graph = PolicyGraph(module, dummy_forward_args, compute_config)
    if callable(policy):
        returned = policy(graph, compute_config)
        if not isinstance(returned, PolicyGraph):
            raise TypeError(f"a policy function must return the graph that it was given, not {returned!r:.80}")
        return returned.layout()
    choose, _ = POLICIES[policy]
    _check_keys(compute_config.pas_config)
    choose(graph, compute_config)
    return graph.layout()


def _dp(graph: PolicyGraph, compute_config: ComputeConfig) -> None:
    if compute_config.plan_ngpus != 1:
        raise ValueError(
            f"dp has units of one rank, and plan_ngpus is {compute_config.plan_ngpus}: give plan_ngpus=1, and let the "
            f"sampler divide the rows over units, or take another policy"
        )


def _data(graph: PolicyGraph, compute_config: ComputeConfig) -> None:
    ranks = compute_config.plan_ngpus
    graph.divide(ranks, rows_plan(graph.module) if ranks > 1 else None)


def _pp(graph: PolicyGraph, compute_config: ComputeConfig) -> None:
    stages = compute_config.pas_config.get("pipeline_nstages", "auto")
    if stages not in ("auto", compute_config.plan_ngpus):
        raise ValueError(
            f"pp needs pipeline_nstages={compute_config.plan_ngpus}, which is plan_ngpus, or 'auto', not {stages!r}: "
            f"use hybrid for other numbers"
        )
    _hybrid(graph, compute_config)


def _hybrid(graph: PolicyGraph, compute_config: ComputeConfig) -> None:
    compute_config.check_end2end()
    settings = compute_config.pas_config
    stages = settings.get("pipeline_nstages", "auto")
    stages = compute_config.plan_ngpus if stages == "auto" else stages
    if "pipeline_nmicros" not in settings:
        raise ValueError(
            'pas_config needs pipeline_nmicros, the number of samples of a step: pas_config={"pipeline_nmicros": 4} '
            "for steps of 4"
        )
    ranks = settings.get("pp_size", min(stages, compute_config.plan_ngpus) if is_whole(stages) else stages)
    if not is_whole(ranks) or ranks < 1 or compute_config.plan_ngpus % ranks:
        raise ValueError(f"pp_size={ranks!r} must be a divisor of plan_ngpus={compute_config.plan_ngpus}")
    if is_whole(stages) and stages > 0 and compute_config.plan_ngpus % stages and stages % compute_config.plan_ngpus:
        raise ValueError(f"pipeline_nstages={stages} must divide plan_ngpus={compute_config.plan_ngpus}")
    graph.divide(compute_config.plan_ngpus // ranks)
    graph.schedule(settings.get("pipeline_scheduler", "1f1b"), stages, settings["pipeline_nmicros"])


POLICIES: dict[str, tuple[Callable[[PolicyGraph, ComputeConfig], None], tuple[str, ...]]] = {
    "dp": (_dp, ()),
    "tp": (lambda graph, compute_config: graph.divide(compute_config.plan_ngpus), ("seed",)),
    "pp": (_pp, _PIPELINE),
    "data": (_data, ()),
    "hybrid": (_hybrid, _PIPELINE),
    "autodist": (autodist, SETTINGS),
}


def _check_keys(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a setting that no policy has. Names with ``_`` are the user's.

    Settings of other policies have no effect: one ``pas_config`` serves all policies.
    """
    known = dict.fromkeys(name for _, names in POLICIES.values() for name in names)
    unknown = [name for name in settings if name not in known and not str(name).startswith("_")]
    if unknown:
        raise ValueError(
            f"pas_config has {', '.join(map(str, unknown))}, and policies have {', '.join(known)}. Leave them out, or "
            f"begin names of your own with _"
        )
