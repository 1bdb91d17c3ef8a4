"""Additions to the actions of a rank: what takes part in a step beside the stages, around their compute actions.

With sharded parameters and replicas, stage 2 of a rank::

    families    2F0                    2F1   2B0   2B1
    lowered     2GATHER0 2F0 2GATHERED0  2F1   2B0   2AVERAGE1 2REDUCE1 2B1 2RESHARD1 2AVERAGED1

An addition begins before an action and ends after it, so that it overlaps with it. Families know nothing of them.
Around a pair of actions that run at once, all that begins before its second one begins before the first::

    families    0F5 3B2
    lowered     3AVERAGE2 0DISPATCH5 0F5 3B2 3COMBINE2 3AVERAGED2
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from nxdpp.schedules.actions import BACKWARDS, BEGINS, COMPUTE, Action, ActionKind, pairs


class Around(Enum):
    """The compute actions around which an addition is: of a stage, or of ``pairs``. ``END`` is the end of a rank's."""

    EACH = auto()
    FIRST = auto()
    LAST = auto()
    LAST_BACKWARD = auto()
    PAIR = auto()
    END = auto()


class Addition(NamedTuple):
    """Actions of the kinds ``begins`` before and ``ends`` after the actions ``around`` which they are."""

    around: Around
    begins: ActionKind | None
    ends: ActionKind | None


Additions = tuple[Addition, ...]
# Replicas average gradients. Each average begins in the last backward of its stage.
AVERAGE: Additions = (Addition(Around.LAST_BACKWARD, ActionKind.AVERAGE, ActionKind.AVERAGED),)
# They share parameters, which are whole from the first forward of a stage to its last action.
SHARDS_ONCE_A_STEP: Additions = (
    Addition(Around.FIRST, ActionKind.GATHER, ActionKind.GATHERED),
    Addition(Around.LAST, ActionKind.REDUCE, ActionKind.RESHARD),
)
# They share parameters, which are whole only while they compute. A backward that ends reduces gradients too.
SHARDS_EACH_MICROBATCH: Additions = (Addition(Around.EACH, ActionKind.GATHER, ActionKind.RESHARD),)
# A forward and a backward fill each other's waits for the tokens of experts.
TOKENS: Additions = (Addition(Around.PAIR, ActionKind.DISPATCH, ActionKind.COMBINE),)
# Of each stage of ZeRO. The optimizer of ZeRO-1 exchanges after the schedule.
OF_ZERO: tuple[Additions, ...] = (AVERAGE, (), SHARDS_ONCE_A_STEP, SHARDS_EACH_MICROBATCH)


def add(actions: Sequence[Action], additions: Iterable[Addition]) -> list[Action]:
    """Return ``actions`` of a rank with ``additions``, of which the first is the innermost."""
    before: defaultdict[int, list[ActionKind]] = defaultdict(list)
    after: defaultdict[int, list[ActionKind]] = defaultdict(list)
    at_end: list[ActionKind] = []
    paired: dict[int, int] = {}
    for around, begins, ends in additions:
        if around is Around.PAIR:
            paired = pairs(actions)
        for place in _places(actions, around):
            before[place] += [] if begins is None else [begins]
            after[paired.get(place, place) if around is Around.PAIR else place] += [] if ends is None else [ends]
        at_end += [ends] if around is Around.END and ends is not None else []
    seconds = set(paired.values())
    found: list[Action] = []
    for place, action in enumerate(actions):
        begun = [paired[place], place] if place in paired else [] if place in seconds else [place]
        found += [actions[at]._replace(kind=kind) for at in begun for kind in reversed(before.get(at, ()))]
        found.append(action)
        found += [action._replace(kind=kind) for kind in after.get(place, ())]
    last = next(action for action in reversed(actions) if action.kind in COMPUTE)
    return found + [last._replace(kind=kind) for kind in at_end if last.kind in BACKWARDS]


def compute_of(actions: Sequence[Action], place: int) -> Action:
    """Return the compute action to which the added action at ``place`` belongs."""
    stage, kind, microbatch, _ = actions[place]
    near = actions[place + 1 :] if kind in BEGINS else reversed(actions[:place])
    return next(each for each in near if each.kind in COMPUTE and (each.stage, each.microbatch) == (stage, microbatch))


def _places(actions: Sequence[Action], around: Around) -> Iterable[int]:
    """Return the places of the compute actions ``around`` which an addition is."""
    if around is Around.END:
        return ()
    if around is Around.PAIR:
        return pairs(actions)
    kinds = BACKWARDS if around is Around.LAST_BACKWARD else COMPUTE
    computes = [(place, action) for place, action in enumerate(actions) if action.kind in kinds]
    if around is Around.EACH:
        return (place for place, _ in computes)
    in_order = reversed(computes) if around is Around.FIRST else computes
    return {action.stage: place for place, action in in_order}.values()
