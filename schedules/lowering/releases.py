"""Releases: the actions after which a rank knows that a send has finished, and can free its memory without waiting.

A tensor has arrived once the other rank has run the action that uses it. A rank knows that when it receives a tensor
computed at that action or later. Under 1F1B, the gradient of microbatch 0 shows that its activation has arrived::

    rank 0   0F0  0F1   ·   0B0  0F2  0B1 ...       after 0B0 the activation of microbatch 0 is free
    rank 1        1F0  1B0  1F1  1B1 ...

To wait for a send at another time could stop a rank that others wait for.
"""

from bisect import bisect_left
from collections.abc import Collection

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.lowering.lowering import Exchanges, StagePair

_USED_BY = {
    ActionKind.SEND_ACTIVATION: (ActionKind.FORWARD,),
    ActionKind.SEND_GRADIENT: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}
_MADE_BY = {
    ActionKind.RECEIVE_ACTIVATION: (ActionKind.FORWARD,),
    ActionKind.RECEIVE_GRADIENT: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}


def releases(schedule: Schedule, rank: int, edges: Collection[StagePair]) -> list[list[Action]]:
    """Return for each compute action of ``rank`` the sends, with peers, that are known to have finished after it.

    Sends without such an action are in none of the lists.
    """
    return _releases(schedule, rank, Exchanges(schedule, edges), _places(schedule))


def releases_of_all(schedule: Schedule, edges: Collection[StagePair]) -> list[list[list[Action]]]:
    """Return ``releases`` of every rank."""
    exchanges, places = Exchanges(schedule, edges), _places(schedule)
    return [_releases(schedule, rank, exchanges, places) for rank in range(len(schedule))]


def _places(schedule: Schedule) -> list[dict[Action, int]]:
    return [{action: place for place, action in enumerate(actions)} for actions in schedule]


def _releases(
    schedule: Schedule, rank: int, exchanges: Exchanges, places: list[dict[Action, int]]
) -> list[list[Action]]:
    heard = _heard(schedule, rank, exchanges, places)
    over: list[list[Action]] = [[] for _ in schedule[rank]]
    for action in schedule[rank]:
        for send in exchanges.sends(action):
            assert send.peer is not None, "exchanges name their peers"
            other = exchanges.rank_of[send.peer]
            used = _place(places[other], send.peer, _USED_BY[send.kind], send.microbatch)
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
            made = _place(places[other], receive.peer, _MADE_BY[receive.kind], receive.microbatch)
            own_places, latest = heard.setdefault(other, ([], []))
            own_places.append(place)
            latest.append(max(made, latest[-1] if latest else made))
    return heard


def _place(places: dict[Action, int], stage: int, kinds: Collection[ActionKind], microbatch: int) -> int:
    return next(places[action] for kind in kinds if (action := Action(stage, kind, microbatch)) in places)
