"""All cases of a sweep over families, sizes, boundaries and situations.

    python -m tests.schedules.transport_model.sweep --ranks 64

checks any number of ranks in all situations that have the waits of the others. ``--all`` checks each situation.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import StagePair
from nxdpp.schedules.lowering.transport_rules import GLOO, NCCL, TransportRules
from tests.schedules.transport_model.boundaries import chain, with_skips
from tests.schedules.transport_model.model import Model, Programs
from tests.schedules.transport_model.situation import Backend, Situation
from tests.schedules.transport_model.verdict import backends, programs, situations, strictest

RANKS = (2, 3, 4, 8, 16, 64)
BOUNDARIES: dict[str, Callable[[int], frozenset[StagePair]]] = {"chain": chain, "skips": with_skips}


class Case(NamedTuple):
    """A pipeline whose step is checked."""

    family: str
    ranks: int
    microbatches: int
    boundaries: str
    trains: bool
    rules: TransportRules

    def programs(self) -> Programs:
        """Return the programs of all ranks."""
        family = FAMILIES[self.family]
        placement = family.placement(self.ranks)
        edges = BOUNDARIES[self.boundaries](placement.stages)
        schedule = (
            family.build(self.ranks, self.microbatches) if self.trains else forward_only(placement, self.microbatches)
        )
        return programs(schedule, edges, self.rules, self.trains)


def numbers_of_microbatches(ranks: int) -> list[int]:
    """Return 1, p - 1, p, 2 p + 1 and 4 p."""
    return sorted({1, ranks - 1, ranks, 2 * ranks + 1, 4 * ranks})


def cases(ranks: int, microbatches: int, rules: TransportRules) -> Iterator[Case]:
    """Yield the cases of all families."""
    for family in FAMILIES:
        for boundaries in BOUNDARIES:
            for trains in (True, False):
                yield Case(family, ranks, microbatches, boundaries, trains, rules)


def deadlocks(
    case: Case, chosen: Callable[[Backend, int], list[Situation]] = lambda backend, _: strictest(backend)
) -> list[str]:
    """Return a text for each deadlock in the ``chosen`` situations."""
    ranks = case.programs()
    found = []
    for backend in backends(case.rules):
        for situation in chosen(backend, case.ranks):
            try:
                Model(ranks, backend, situation).check()
            except ScheduleError as error:
                found.append(f"{case}, {backend.value}, {situation}: {error}")
    return found


def every_situation(backend: Backend, ranks: int) -> list[Situation]:
    """Return all situations, those of each single rank included."""
    return list(situations(backend, ranks))


def main() -> None:
    """Print a line for each size; exit 1 after a deadlock."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="numbers of ranks; by default all of the sweep")
    parser.add_argument(
        "--all", action="store_true", help="each situation, not only those with the waits of the others"
    )
    options = parser.parse_args()
    found: list[str] = []
    for ranks in options.ranks or RANKS:
        for microbatches in numbers_of_microbatches(ranks):
            start, number = time.process_time(), len(found)
            for rules in (GLOO, NCCL):
                for case in cases(ranks, microbatches, rules):
                    found += deadlocks(case, every_situation) if options.all else deadlocks(case)
            seconds = time.process_time() - start
            print(f"p = {ranks}, m = {microbatches}: {len(found) - number} deadlocks, {seconds:.1f} s", flush=True)
    print(*found, sep="\n")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
