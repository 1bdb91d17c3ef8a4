"""V-shaped schedules with controllable memory: a building block repeated, then squeezed (arXiv 2405.15362).

A building block has the slots of the two forwards and the two input-gradients of microbatch 0 on a rank. Microbatch j
runs 6 j slots later: a microbatch has six actions on a rank. The offsets set how long a microbatch is in flight, and
so how many are. Weight-gradients take the slots that are left.

The repeated block leaves a larger bubble at the start and the end than memory demands. Squeezing reduces it:

1. Each action, in the order of the slots, moves to the earliest free slot. Its inputs must be ready there, and its
   rank must not exceed its memory.
2. All ranks run in the resulting order, but weight-gradients run only while a rank would wait.

The blocks of ``v_half`` and ``v_min`` and the first step follow the authors' scheduler
(sail-sg/zero-bubble-pipeline-parallelism, ``zbv_greedy.py``).
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.placement import Placement

_PERIOD = 6
_FORWARD, _INPUT, _WEIGHT = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


class BuildingBlock(NamedTuple):
    """Slots of a rank's actions on microbatch 0; no two are equal modulo 6."""

    first_forward: int
    second_forward: int
    second_input_gradient: int
    first_input_gradient: int


class _Placed(NamedTuple):
    slot: int
    action: Action


def squeeze(
    placement: Placement, microbatches: int, block: Callable[[int], BuildingBlock], most_in_flight: int
) -> Schedule:
    """Return the squeezed schedule of ``block(rank)``, in which no rank holds more than ``most_in_flight`` chunks.

    The repeated block itself must not hold more.
    """
    repeated = [_repeat(placement.stages_of(rank), microbatches, block(rank)) for rank in range(placement.ranks)]
    moved = _move_earlier(repeated, placement, microbatches, most_in_flight)
    return _delay_weights(moved, placement, microbatches, most_in_flight)


def _repeat(stages: Sequence[int], microbatches: int, block: BuildingBlock) -> list[_Placed]:
    """Return a rank's actions by slot; weight-gradients, the oldest first, take the free slots."""
    first, second = stages
    kinds = ((first, _FORWARD), (second, _FORWARD), (second, _INPUT), (first, _INPUT))
    at = {
        offset + _PERIOD * microbatch: Action(stage, kind, microbatch)
        for offset, (stage, kind) in zip(block, kinds, strict=True)
        for microbatch in range(microbatches)
    }
    assert len(at) == len(kinds) * microbatches, "a building block fits into itself"
    placed: list[_Placed] = []
    weights: deque[Action] = deque()
    for slot in count():
        if slot in at:
            action = at.pop(slot)
            placed.append(_Placed(slot, action))
            if action.kind is _INPUT:
                weights.append(action._replace(kind=_WEIGHT))
        elif weights:
            placed.append(_Placed(slot, weights.popleft()))
        elif not at:
            return placed
    raise AssertionError("counting has no end")


class _Slots:
    """Slots of a rank: the free ones, and the number of chunks in flight in each."""

    def __init__(self, placed: Sequence[_Placed]) -> None:
        length = placed[-1].slot + 1
        self._free = bytearray(b"\1" * length)
        self._in_flight = [0] * length
        in_flight = before = 0
        for slot, action in placed:
            self._in_flight[before:slot] = [in_flight] * (slot - before)
            in_flight += action.kind is _FORWARD
            self._in_flight[slot] = in_flight
            in_flight -= action.kind is _WEIGHT
            self._free[slot] = 0
            before = slot + 1

    def move(self, slot: int, kind: ActionKind, earliest: int, most_in_flight: int) -> int:
        """Move the action in ``slot`` to the first free slot from ``earliest`` on, and return that slot."""
        if kind is _FORWARD:
            earliest = self._first_with_room(slot, earliest, most_in_flight)
        better = self._free.find(1, earliest, slot)
        if better < 0:
            return slot
        self._free[slot], self._free[better] = 1, 0
        if kind is _FORWARD:
            self._hold(better, slot, 1)
        elif kind is _WEIGHT:
            self._hold(better + 1, slot + 1, -1)
        return better

    def _first_with_room(self, slot: int, earliest: int, most_in_flight: int) -> int:
        while slot > earliest and self._in_flight[slot - 1] < most_in_flight:
            slot -= 1
        return slot

    def _hold(self, start: int, stop: int, more: int) -> None:
        self._in_flight[start:stop] = [in_flight + more for in_flight in self._in_flight[start:stop]]


def _move_earlier(
    repeated: Sequence[list[_Placed]], placement: Placement, microbatches: int, most_in_flight: int
) -> list[list[Action]]:
    slots = [_Slots(placed) for placed in repeated]
    moved: list[list[_Placed]] = [[] for _ in repeated]
    # The slot after each action, by kind, stage and microbatch; 0 before it is placed.
    after = {kind: [[0] * microbatches for _ in range(placement.stages)] for kind in (_FORWARD, _INPUT, _WEIGHT)}
    forward_after, input_after = after[_FORWARD], after[_INPUT]
    in_order = sorted(
        (slot, rank, action[0], action) for rank, placed in enumerate(repeated) for slot, action in placed
    )
    for slot, rank, stage, action in in_order:
        kind, microbatch = action.kind, action.microbatch
        earliest = after[kind][stage][microbatch - 1] if microbatch else 0
        if kind is _FORWARD and stage:
            earliest = max(earliest, forward_after[stage - 1][microbatch])
        elif kind is _INPUT:
            behind = input_after[stage + 1][microbatch] if stage < placement.stages - 1 else 0
            earliest = max(earliest, forward_after[stage][microbatch], behind)
        elif kind is _WEIGHT:
            earliest = max(earliest, input_after[stage][microbatch])
        slot = slots[rank].move(slot, kind, earliest, most_in_flight)
        after[kind][stage][microbatch] = slot + 1
        moved[rank].append(_Placed(slot, action))
    return [[action for _, action in sorted(placed, key=lambda each: each.slot)] for placed in moved]


def _delay_weights(schedule: Schedule, placement: Placement, microbatches: int, most_in_flight: int) -> Schedule:
    """Run slot by slot in the given order, weight-gradients only while a rank would wait."""
    last = placement.stages - 1
    others = [[action for action in actions if action.kind is not _WEIGHT] for actions in schedule]
    positions = [0] * placement.ranks
    in_flight = [0] * placement.ranks
    weights: list[deque[Action]] = [deque() for _ in schedule]
    delayed: Schedule = [[] for _ in schedule]
    # The slot after each action; ``never`` before it has run.
    never = sum(map(len, schedule)) + 1
    forward_after = [[never] * microbatches for _ in range(placement.stages)]
    input_after = [[never] * microbatches for _ in range(placement.stages)]

    def can_run(action: Action, rank: int, slot: int) -> bool:
        stage, kind, microbatch, _ = action
        if kind is _FORWARD:
            return in_flight[rank] < most_in_flight and (stage == 0 or forward_after[stage - 1][microbatch] <= slot)
        return stage == last or input_after[stage + 1][microbatch] <= slot

    unfinished = list(range(placement.ranks))
    for slot in count():
        for rank in unfinished:
            position = positions[rank]
            if position < len(others[rank]) and can_run(action := others[rank][position], rank, slot):
                positions[rank] += 1
                delayed[rank].append(action)
                if action.kind is _FORWARD:
                    in_flight[rank] += 1
                    forward_after[action.stage][action.microbatch] = slot + 1
                else:
                    input_after[action.stage][action.microbatch] = slot + 1
                    weights[rank].append(action._replace(kind=_WEIGHT))
            elif weights[rank]:
                in_flight[rank] -= 1
                delayed[rank].append(weights[rank].popleft())
        unfinished = [rank for rank in unfinished if len(delayed[rank]) < len(schedule[rank])]
        if not unfinished:
            return delayed
        assert slot < never, "delayed weight-gradients cannot block an order that can run"
    raise AssertionError("counting has no end")
