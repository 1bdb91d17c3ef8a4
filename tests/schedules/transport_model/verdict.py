"""Verdict on a schedule over a transport: no deadlock, or the first situation that has one."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.lowering.additions import Addition, add
from nxdpp.schedules.lowering.lowering import Exchanges, StagePair, lower
from nxdpp.schedules.lowering.releases import in_flight_limit, with_releases
from nxdpp.schedules.lowering.transport_rules import GLOO, TransportRules
from tests.schedules.transport_model.model import Model, Programs
from tests.schedules.transport_model.situation import Backend, Situation, Synchronises

_STEPS = (True, False)


class Deadlock(NamedTuple):
    """A deadlock: where, and which events wait for each other."""

    backend: Backend
    situation: Situation
    message: str

    def __str__(self) -> str:
        return f"{self.backend.value}, {self.situation}: {self.message}"


def programs(
    schedule: Schedule,
    edges: Collection[StagePair],
    rules: TransportRules,
    trains: bool = True,
    additions: Sequence[Addition] = (),
) -> Programs:
    """Return the programs that the ranks' engines compile, with the lowest limit of sends in flight."""
    lowered = lower(schedule, edges, rules.posted_ahead)
    ranks = [
        add(with_releases(actions, schedule, rank, edges) if trains else actions, additions)
        for rank, actions in enumerate(lowered)
    ]
    return Programs(ranks, Exchanges(schedule, edges), rules, in_flight_limit(schedule, edges, rules))


def backends(rules: TransportRules) -> list[Backend]:
    """Return the backends whose semantics ``rules`` are for."""
    return [Backend.GLOO] if rules.name == GLOO.name else [Backend.NCCL_LAZY, Backend.NCCL_EAGER]


def situations(backend: Backend, ranks: int) -> Iterator[Situation]:
    """Yield all situations of a backend. Under gloo the host computes: it asks no device."""
    if backend is Backend.GLOO:
        yield from map(Situation, _STEPS)
        return
    for first_step in _STEPS:
        for asks in (False, True):
            yield Situation(first_step, asks)
            for synchronises in (Synchronises.FIRST_MICROBATCH, Synchronises.ALWAYS):
                for on_rank in (None, *range(ranks)):
                    yield Situation(first_step, asks, synchronises, on_rank)
            yield Situation(first_step, asks, one_queue=True)


def strictest(backend: Backend) -> list[Situation]:
    """Return the situations that have all waits of the others, for receives in the global order.

    Under NCCL a first step has all waits of a later one. A rank that waits after each call has them all in a row, as
    with one hardware queue.
    """
    if backend is Backend.GLOO:
        return list(situations(backend, 0))
    return [Situation(first_step=True, asks=True, synchronises=Synchronises.ALWAYS)]


def find_deadlock(ranks: Programs) -> Deadlock | None:
    """Return a deadlock in the mildest situation that has one; ``None`` if no situation has one."""
    for backend in backends(ranks.rules):
        if ranks.rules.posted_ahead is None and not any(_run(ranks, backend, each) for each in strictest(backend)):
            continue
        for situation in situations(backend, len(ranks.ranks)):
            if deadlock := _run(ranks, backend, situation):
                return deadlock
    return None


def _run(ranks: Programs, backend: Backend, situation: Situation) -> Deadlock | None:
    try:
        Model(ranks, backend, situation).check()
    except ScheduleError as error:
        return Deadlock(backend, situation, str(error))
    return None
