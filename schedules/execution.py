"""Execution of a schedule in simulated time: each action starts as soon as its rank and its inputs are ready.

A forward needs the forward of the stage before, a backward or input-gradient the backward of the stage behind. Tensors
that skip stages are ready earlier.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from nxdpp.schedules.actions import Action, ActionKind, Schedule


class Times(NamedTuple):
    """Times of each stage in any unit; item ``s`` of each is for stage ``s``.

    A full backward takes the time of the input- and the weight-gradient. ``transfer`` is between stage ``s`` and the
    next one, in either direction, if they are on different ranks. The last item is not used.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfer: Sequence[float]

    @property
    def lengths(self) -> dict[ActionKind, Sequence[float]]:
        """Times of the compute actions of each kind, by stage."""
        full = [i + w for i, w in zip(self.input_gradient, self.weight_gradient, strict=True)]
        kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD)
        return dict(zip(kinds, (*self[:3], full), strict=True))


class Blocked(RuntimeError):
    """Ranks that wait for each other; the message names the actions."""


def run_in_order(schedule: Schedule, stages: int, microbatches: int, times: Times | None = None) -> list[list[float]]:
    """Return the start of each action of each rank, at 0 without ``times``; ``Blocked`` if no rank can continue."""
    execution = _Execution(schedule, stages, microbatches, times or Times(*[[0.0] * stages] * 4))
    execution.run()
    return execution.starts


class _Execution:
    def __init__(self, schedule: Schedule, stages: int, microbatches: int, times: Times) -> None:
        self.starts: list[list[float]] = [[] for _ in schedule]
        self._schedule = schedule
        self._rank_of = {action[0]: rank for rank, actions in enumerate(schedule) for action in actions}
        self._times = times
        self._full = times.lengths[ActionKind.BACKWARD]
        self._transfer = [
            0.0 if self._rank_of[stage] == self._rank_of.get(stage + 1) else times.transfer[stage]
            for stage in range(stages)
        ]
        # When the activation and the gradient of a microbatch arrive from a stage; -1 before they are computed.
        self._forward = [[-1.0] * microbatches for _ in range(stages)]
        self._backward = [[-1.0] * microbatches for _ in range(stages)]
        # The rank that waits for a tensor of a stage.
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
        """Run actions of ``rank`` until one has to wait. Most of the time of a check is spent here."""
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
        """Describe one circle of ranks that wait for each other."""
        circle: list[int] = []
        rank = next(iter(stuck))
        while rank not in circle:
            circle.append(rank)
            rank = self._rank_of[_needed(stuck[rank]).stage]
        circle = circle[circle.index(rank) :]
        waits = "; ".join(
            f"rank {rank}, action {len(self.starts[rank])} ({stuck[rank]}) waits for {_needed(stuck[rank])} of rank "
            f"{self._rank_of[_needed(stuck[rank]).stage]}"
            for rank in circle
        )
        return f"deadlock: {waits}."


def _needed(action: Action) -> Action:
    step = -1 if action.kind is ActionKind.FORWARD else 1
    return Action(action.stage + step, action.kind, action.microbatch)
