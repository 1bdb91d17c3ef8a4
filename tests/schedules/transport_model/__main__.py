"""Check a schedule for deadlocks over a backend, from a checkout of the repository.

::

    python -m tests.schedules.transport_model mine.csv --transport nccl
    python -m tests.schedules.transport_model zb-v --ranks 4 --microbatches 8 --transport gloo
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.families.forward_only import evaluation
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.lowering.transport_rules import GLOO, RULES, TransportRules
from nxdpp.schedules.placement import ListedPlacement, Placement, placement_of
from nxdpp.schedules.written import read_schedule
from tests.schedules.transport_model.boundaries import chain, with_skips
from tests.schedules.transport_model.verdict import find_deadlock, programs

_COVERED_BY_ALL = ("training and evaluation", "a chain and tensors that skip stages", "first and later steps")
_COVERED_BY_NCCL = (
    "lazy and eager communicators",
    "forwards that ask the device",
    "device-wide synchronisation on one rank or all, at any call",
    "one hardware queue",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print that there is no deadlock, or the circle of waits. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.schedules.transport_model")
    parser.add_argument("name", metavar="NAME", help="a family of schedules, or a CSV file with one row per rank")
    parser.add_argument("--ranks", type=int, metavar="N", default=4, help="ranks of a family's schedule (4)")
    parser.add_argument("--microbatches", type=int, metavar="N", default=8, help="microbatches of it (8)")
    parser.add_argument("--virtual", type=int, metavar="N", help="chunks per rank of it (default of the family)")
    parser.add_argument("--transport", choices=tuple(RULES), default="nccl", help="rules of the messages (nccl)")
    options = parser.parse_args(arguments)
    try:
        rules = RULES[options.transport]
        placement: Placement | ListedPlacement
        if options.name.endswith(".csv"):
            schedule = read_schedule(Path(options.name))
            check(schedule)
            placement = placement_of(schedule)
        else:
            family = find_family(options.name)
            placement = family.placement(options.ranks, options.virtual)
            schedule = family.build(options.ranks, options.microbatches, options.virtual)
        check_transport(schedule, placement, rules)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"transport {rules.name}: no deadlock ({'; '.join(covered(rules))})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
