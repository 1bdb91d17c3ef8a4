"""Cases over families, sizes, boundaries and situations."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import StagePair
from nxdpp.schedules.lowering.transport_rules import TransportRules
from tests.schedules.transport_model.boundaries import chain, with_skips
from tests.schedules.transport_model.model import Model, Programs
from tests.schedules.transport_model.situation import Backend, Situation
from tests.schedules.transport_model.verdict import backends, programs, situations, strictest

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
