"""All ranks going through their lists, each action as soon as its rank and what it needs are there.

A forward needs that of the stage before, a backward or input-gradient that of the stage behind. What else a model
may send (past several stages) is made earlier than that.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from nxdpp.schedules.actions import Action, ActionKind, Schedule


class Times(NamedTuple):
    """How long each stage takes, in any unit; the ``s``-th of each is stage ``s``'s.

    A full backward takes the input- and the weight-gradient's time. ``transfer`` is that between stage ``s`` and the
    next, either way, where they are on different ranks; the last stage's is not used.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfer: Sequence[float]


class Blocked(RuntimeError):
    """Ranks that wait for each other; says which action of which rank waits for what."""


def run_in_order(schedule: Schedule, stages: int, microbatches: int, times: Times | None = None) -> list[list[float]]:
    """When each action of each rank starts; without ``times``, all of them take none.

    Raises:
        Blocked: where no rank can go on.
    """
    execution = _Execution(schedule, stages, microbatches, times or Times(*[[0.0] * stages] * 4))
    execution.run()
    return execution.starts


class _Execution:
    def __init__(self, schedule: Schedule, stages: int, microbatches: int, times: Times) -> None:
        self.starts: list[list[float]] = [[] for _ in schedule]
        self._schedule = schedule
        self._rank_of = {action[0]: rank for rank, actions in enumerate(schedule) for action in actions}
        self._times = times
        self._full = [i + w for i, w in zip(times.input_gradient, times.weight_gradient, strict=True)]
        self._transfer = [
            0.0 if self._rank_of[stage] == self._rank_of.get(stage + 1) else times.transfer[stage]
            for stage in range(stages)
        ]
        # When what a stage makes of a microbatch is there, going forward and going back; -1 where it is not yet.
        self._forward = [[-1.0] * microbatches for _ in range(stages)]
        self._backward = [[-1.0] * microbatches for _ in range(stages)]
        # The rank that waits for anything of a stage.
        self._waits_for_forward: list[int | None] = [None] * stages
        self._waits_for_backward: list[int | None] = [None] * stages
        self._clocks = [0.0] * len(schedule)
        self._ready = deque(range(len(schedule)))

    def run(self) -> None:
        while self._ready:
            self._advance(self._ready.popleft())
        stuck = {
            rank: actions[len(starts)]
            for rank, (actions, starts) in enumerate(zip(self._schedule, self.starts, strict=True))
            if len(starts) < len(actions)
        }
        if stuck:
            raise Blocked(self._describe(stuck))

    def _advance(self, rank: int) -> None:
        """Run actions of ``rank`` until one has to wait; a long loop, and most of the time of a check."""
        forward_kind, weight_kind, full_kind = ActionKind.FORWARD, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD
        forward, backward, transfer = self._forward, self._backward, self._transfer
        takes_forward, takes_input, takes_weight, _ = self._times
        actions, starts, clock, last = self._schedule[rank], self.starts[rank], self._clocks[rank], len(forward) - 1
        for position in range(len(starts), len(actions)):
            stage, kind, microbatch, _ = actions[position]
            waiter = None
            start = clock
            if kind is forward_kind:
                if stage:
                    there = forward[stage - 1][microbatch]
                    if there < 0:
                        self._waits_for_forward[stage - 1] = rank
                        break
                    start = max(clock, there)
                clock = start + takes_forward[stage]
                forward[stage][microbatch] = clock + transfer[stage]
                waiter = self._waits_for_forward[stage]
                self._waits_for_forward[stage] = None
            elif kind is weight_kind:
                clock = start + takes_weight[stage]
            else:
                if stage < last:
                    there = backward[stage + 1][microbatch]
                    if there < 0:
                        self._waits_for_backward[stage + 1] = rank
                        break
                    start = max(clock, there)
                clock = start + (self._full[stage] if kind is full_kind else takes_input[stage])
                backward[stage][microbatch] = clock + (transfer[stage - 1] if stage else 0.0)
                waiter = self._waits_for_backward[stage]
                self._waits_for_backward[stage] = None
            starts.append(start)
            if waiter is not None:
                self._ready.append(waiter)
        self._clocks[rank] = clock

    def _describe(self, stuck: dict[int, Action]) -> str:
        """One circle of ranks that wait for each other."""
        circle: list[int] = []
        rank = next(iter(stuck))
        while rank not in circle:
            circle.append(rank)
            rank = self._rank_of[_needed(stuck[rank]).stage]
        circle = circle[circle.index(rank) :]
        waits = ", ".join(
            f"rank {rank}, action {len(self.starts[rank])} ({stuck[rank]}) waits for {_needed(stuck[rank])} of rank "
            f"{self._rank_of[_needed(stuck[rank]).stage]}"
            for rank in circle
        )
        return f"the ranks wait for each other for ever: {waits}, which comes later there."


def _needed(action: Action) -> Action:
    """What an action that waits is waiting for."""
    step = -1 if action.kind is ActionKind.FORWARD else 1
    return Action(action.stage + step, action.kind, action.microbatch)
