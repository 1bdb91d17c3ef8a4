"""Verdict on a schedule over a transport, for the command line."""

import sys
from typing import Any

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.families.forward_only import evaluation
from nxdpp.schedules.lowering.transport_rules import GLOO, TransportRules
from nxdpp.schedules.placement import ListedPlacement, Placement
from nxdpp.schedules.transport_model.boundaries import chain, with_skips
from nxdpp.schedules.transport_model.verdict import find_deadlock, programs

_COVERED_BY_ALL = ("training and evaluation", "a chain and tensors that skip stages", "first and later steps")
_COVERED_BY_NCCL = (
    "lazy and eager communicators",
    "forwards that ask the device",
    "device-wide synchronisation on one rank or all, at any call",
)
# Actions of a schedule above which a line tells each of its checks.
_TOLD = 2**13


def covered(rules: TransportRules) -> list[str]:
    """Return the situations that ``check_transport`` covers, as texts."""
    return [*_COVERED_BY_ALL, *(() if rules.name == GLOO.name else _COVERED_BY_NCCL)]


def check_transport(schedule: Schedule, placement: Placement | ListedPlacement, rules: TransportRules) -> None:
    """Raise ``ValueError`` with the first deadlock of a step, or of an evaluation on the same stages.

    The checks of a long schedule, each of some seconds, are told on the standard error.
    """
    sizes = check(schedule)
    steps = {"training": schedule} if sizes.trains else {}
    steps["evaluation"] = evaluation(placement, sizes.microbatches) if sizes.trains else schedule
    told = sum(map(len, schedule)) > _TOLD
    for boundaries, edges in (("a chain", chain(sizes.stages)), ("a chain with skips", with_skips(sizes.stages))):
        for name, actions in steps.items():
            if told:
                print(f"checking transport {rules.name}, {name}, {boundaries} ...", file=sys.stderr, flush=True)
            deadlock = find_deadlock(programs(actions, edges, rules, trains=name == "training"))
            if deadlock is not None:
                raise ValueError(f"transport {rules.name}, {name}, {boundaries}: {deadlock}")


def transport_text(rules: TransportRules) -> str:
    """Return the line that says that there is no deadlock."""
    return f"transport {rules.name}: no deadlock ({'; '.join(covered(rules))})"


def transport_as_json(rules: TransportRules) -> dict[str, Any]:
    """Return the same for JSON."""
    return {"transport": {"name": rules.name, "deadlock": False, "covered": covered(rules)}}
