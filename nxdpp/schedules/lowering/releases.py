"""Releases: the actions after which a rank knows that a send has finished, and can free its memory without waiting.

A tensor has arrived once the other rank has run the action that uses it. A rank knows that when it receives a tensor
computed at that action or later. Under 1F1B, the gradient of microbatch 0 shows that its activation has arrived::

    rank 0   0F0  0F1   ·   0B0  0F2  0B1 ...       after 0B0 the activation of microbatch 0 is free
    rank 1        1F0  1B0  1F1  1B1 ...

To wait for a send at another time could stop a rank that others wait for. ``rank_program`` has the releases of a rank
among its actions.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from nxdpp.schedules.actions import COMPUTE, Action, ActionKind, Schedule
from nxdpp.schedules.lowering.additions import TOKENS, Addition, Around, add
from nxdpp.schedules.lowering.lowering import Exchanges, StagePair, lower, lower_rank
from nxdpp.schedules.lowering.rendezvous import sends_in_flight
from nxdpp.schedules.lowering.transport_rules import TransportRules

# The actions that use what is sent, and that make what is received.
_AT_OTHER_END = {
    ActionKind.SEND_ACTIVATION: (ActionKind.FORWARD,),
    ActionKind.RECEIVE_ACTIVATION: (ActionKind.FORWARD,),
    ActionKind.SEND_GRADIENT: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
    ActionKind.RECEIVE_GRADIENT: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}


def releases(schedule: Schedule, rank: int, edges: Collection[StagePair]) -> list[list[Action]]:
    """Return for each compute action of ``rank`` the sends, with peers, that are known to have finished after it.

    Sends without such an action are in none of the lists.
    """
    exchanges = Exchanges(schedule, edges)
    places = [{action: place for place, action in enumerate(actions)} for actions in schedule]
    heard = _heard(schedule, rank, exchanges, places)
    over: list[list[Action]] = [[] for _ in schedule[rank]]
    for action in schedule[rank]:
        for send in exchanges.sends(action):
            assert send.peer is not None, "exchanges name their peers"
            other = exchanges.rank_of[send.peer]
            used = _place(places[other], send)
            own_places, latest = heard.get(other, ([], []))
            # ``latest`` only grows.
            first = bisect_left(latest, used)
            if first < len(own_places):
                over[own_places[first]].append(send)
    return over


def _heard(
    schedule: Schedule, rank: int, exchanges: Exchanges, places: list[dict[Action, int]]
) -> dict[int, tuple[list[int], list[int]]]:
    """Return, for each rank that sends to ``rank``, the places of the actions that receive from it.

    With each is the latest place on that rank that it implies.
    """
    heard: dict[int, tuple[list[int], list[int]]] = {}
    for place, action in enumerate(schedule[rank]):
        for receive in exchanges.receives(action):
            assert receive.peer is not None, "exchanges name their peers"
            other = exchanges.rank_of[receive.peer]
            made = _place(places[other], receive)
            own_places, latest = heard.setdefault(other, ([], []))
            own_places.append(place)
            latest.append(max(made, latest[-1] if latest else made))
    return heard


def _place(places: dict[Action, int], transfer: Action) -> int:
    assert transfer.peer is not None, "exchanges name their peers"
    actions = (Action(transfer.peer, kind, transfer.microbatch) for kind in _AT_OTHER_END[transfer.kind])
    return next(places[action] for action in actions if action in places)


# One transfer can run while the next value is computed.
_SENDS_IN_FLIGHT = 2


RELEASE_OF = {
    ActionKind.SEND_ACTIVATION: ActionKind.RELEASE_ACTIVATION,
    ActionKind.SEND_GRADIENT: ActionKind.RELEASE_GRADIENT,
}


def rank_program(
    schedule: Schedule,
    rank: int,
    edges: Collection[StagePair],
    rules: TransportRules,
    trains: bool,
    additions: Sequence[Addition] = (),
) -> list[Action]:
    """Return the actions of ``rank`` for the compute actions of all ranks, with transfers, releases and ``additions``.

    Without backwards there are no releases.
    """
    actions = lower_rank(schedule, rank, edges, rules.posted_ahead, _has_pairs(additions))
    return add(with_releases(actions, schedule, rank, edges) if trains else actions, additions)


def with_releases(
    actions: Sequence[Action], schedule: Schedule, rank: int, edges: Collection[StagePair]
) -> list[Action]:
    """Return the lowered ``actions`` of ``rank`` with releases after the actions that show them."""
    finished = iter(releases(schedule, rank, edges))
    found: list[Action] = []
    for action in actions:
        found.append(action)
        if action.kind in COMPUTE:
            found += [send._replace(kind=RELEASE_OF[send.kind]) for send in next(finished)]
    return found


def _has_pairs(additions: Sequence[Addition]) -> bool:
    return any(each.around is Around.PAIR for each in additions)


def in_flight_limit(
    schedule: Schedule, edges: Collection[StagePair], rules: TransportRules, additions: Sequence[Addition] = ()
) -> int:
    """Return the limit of sends in flight between two stages, for tensors that no backward holds.

    It is enough where receives begin at their use, as over shared memory.
    """
    if rules.posted_ahead is None:
        # In the global order a rank may wait for each send.
        return _SENDS_IN_FLIGHT
    paired = _has_pairs(additions)
    lowered = lower(schedule, edges, 0, paired)
    lowered = [add(actions, TOKENS) for actions in lowered] if paired else lowered
    return max(_SENDS_IN_FLIGHT, sends_in_flight(lowered, edges))
