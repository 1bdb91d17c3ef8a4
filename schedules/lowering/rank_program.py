"""Program of a rank: the lists that its engine compiles, for the rules of a transport."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nxdpp.schedules.actions import Action, Schedule
from nxdpp.schedules.lowering.lowering import StagePair, lower, lower_rank
from nxdpp.schedules.lowering.releases import releases
from nxdpp.schedules.lowering.rendezvous import sends_in_flight
from nxdpp.schedules.lowering.transport_rules import TransportRules

# One transfer can run while the next value is computed.
_SENDS_IN_FLIGHT = 2


class RankProgram(NamedTuple):
    """Program of a rank.

    Attributes:
        actions: the actions, sends and receives included.
        releases: for each compute action in order, the sends that are finished after it. Empty without backwards.
    """

    actions: Sequence[Action]
    releases: Sequence[Sequence[Action]]


def rank_program(
    schedule: Schedule, rank: int, edges: Collection[StagePair], rules: TransportRules, trains: bool
) -> RankProgram:
    """Return the program of ``rank`` for the compute actions of all ranks."""
    actions = lower_rank(schedule, rank, edges, rules.posted_ahead)
    return RankProgram(actions, releases(schedule, rank, edges) if trains else [])


def in_flight_limit(schedule: Schedule, edges: Collection[StagePair], rules: TransportRules) -> int:
    """Return the limit of sends in flight between two stages, for tensors that no backward holds.

    It is enough where receives begin at their use, as over shared memory.
    """
    if rules.posted_ahead is None:
        # In the global order a rank may wait for each send.
        return _SENDS_IN_FLIGHT
    return max(_SENDS_IN_FLIGHT, sends_in_flight(lower(schedule, edges, 0), edges))
