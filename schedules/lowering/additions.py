"""Additions to the actions of a rank: what takes part in a step beside the stages, around their compute actions.

With sharded parameters and replicas, stage 2 of a rank::

    families    2F0                    2F1   2B0   2B1
    lowered     2GATHER0 2F0 2GATHERED0  2F1   2B0   2AVERAGE1 2REDUCE1 2B1 2RESHARD1 2AVERAGED1

An addition begins before an action and ends after it, so that it overlaps with it. Families know nothing of them.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from nxdpp.schedules.actions import BACKWARDS, COMPUTE, Action, ActionKind

_BEGINS = (ActionKind.GATHER, ActionKind.REDUCE, ActionKind.AVERAGE)


class Around(Enum):
    """The compute actions of a stage around which an addition is; ``END`` is the end of the rank's actions."""

    EACH = auto()
    FIRST = auto()
    LAST = auto()
    LAST_BACKWARD = auto()
    END = auto()


class Addition(NamedTuple):
    """Actions of the kinds ``begins`` before and ``ends`` after the actions ``around`` which they are."""

    around: Around
    begins: ActionKind | None
    ends: ActionKind | None


def add(actions: Sequence[Action], additions: Sequence[Addition]) -> list[Action]:
    """Return ``actions`` of a rank with ``additions``, of which the first is the innermost."""
    places = _places(actions)
    found: list[Action] = []
    for place, action in enumerate(actions):
        own = [each for each in additions if place in places[each.around] and each.around is not Around.END]
        found += [action._replace(kind=each.begins) for each in reversed(own) if each.begins is not None]
        found.append(action)
        found += [action._replace(kind=each.ends) for each in own if each.ends is not None]
    last = next(action for action in reversed(actions) if action.kind in COMPUTE)
    at_end = [each.ends for each in additions if each.around is Around.END and each.ends is not None]
    return found + [last._replace(kind=kind) for kind in at_end if last.kind in BACKWARDS]


def compute_of(actions: Sequence[Action], place: int) -> Action:
    """Return the compute action to which the added action at ``place`` belongs."""
    begins = actions[place].kind in _BEGINS
    near = actions[place + 1 :] if begins else reversed(actions[:place])
    return next(action for action in near if action.kind in COMPUTE)


def _places(actions: Sequence[Action]) -> dict[Around, set[int]]:
    """Return the places of the compute actions of each kind of addition."""
    computes = [(place, action) for place, action in enumerate(actions) if action.kind in COMPUTE]
    return {
        Around.EACH: {place for place, _ in computes},
        Around.FIRST: {*{action.stage: place for place, action in reversed(computes)}.values()},
        Around.LAST: {*{action.stage: place for place, action in computes}.values()},
        Around.LAST_BACKWARD: {
            *{action.stage: place for place, action in computes if action.kind in BACKWARDS}.values()
        },
        Around.END: set(),
    }
