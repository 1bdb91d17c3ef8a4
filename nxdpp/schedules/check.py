"""Check of a schedule: its rules, and that no rank waits forever.

No rank waits for a send, and receives are posted in the order of the sends (``lowering``). A deadlock is therefore a
circle of actions that wait for each other. ``rendezvous`` checks a lowered schedule with a limit on sends in flight.
"""

from collections import Counter
from typing import NamedTuple

from nxdpp.counted import counted
from nxdpp.schedules.actions import ADDED, BACKWARDS, BEGINS, COMPUTE, ENDS, TRANSFERS, Action, ActionKind, Schedule
from nxdpp.schedules.execution import ScheduleError as ScheduleError
from nxdpp.schedules.execution import run_in_order


class ScheduleSize(NamedTuple):
    """Numbers of ranks, stages and microbatches of a schedule; ``trains`` if it has backwards."""

    ranks: int
    stages: int
    microbatches: int
    trains: bool


def check(schedule: Schedule) -> ScheduleSize:
    """Check the compute actions of all ranks, with or without the ones of participants.

    The rules: a stage is on one rank, and every rank has a stage. Every stage runs every microbatch once forward and
    once backward (or one input- and one weight-gradient). A forward comes before its backward, an input-gradient
    before its weight-gradient. No rank waits forever. A schedule without backwards is for evaluation. A stage whose
    parameters are gathered computes while they are whole. Sums over ranks follow the last backward of what they sum.

    Raises:
        ScheduleError: for a broken rule.
    """
    placed = _place(schedule)
    stages = len(placed)
    if not stages:
        raise ScheduleError("the schedule is empty: no rank has any action.")
    if empty := [rank for rank, actions in enumerate(schedule) if not actions]:
        raise ScheduleError(f"rank {empty[0]} has no action; every rank of a pipeline has a stage.")
    if set(placed) != set(range(stages)):
        missing = min(set(range(stages)) - set(placed))
        raise ScheduleError(f"no rank has an action of stage {missing}, though there is one of stage {max(placed)}.")
    microbatches = 1 + max(action[2] for actions in schedule for action in actions)
    _check_number(microbatches, schedule)
    done = [bytearray(microbatches) for _ in range(stages)]
    for rank, actions in enumerate(schedule):
        _check_rank(rank, actions, done)
        _check_added(rank, actions)
    trains = any(any(stage) and max(stage) > _FORWARD_DONE for stage in done)
    _check_complete(done, placed, trains)
    run_in_order(schedule, stages, microbatches)
    return ScheduleSize(len(schedule), stages, microbatches, trains)


def _check_number(microbatches: int, schedule: Schedule) -> None:
    """Bound the microbatches before memory is allocated for each: a mistyped number may have any size."""
    if microbatches <= max(map(len, schedule)):
        return
    rank, at, action = next(
        (rank, at, action)
        for rank, actions in enumerate(schedule)
        for at, action in enumerate(actions)
        if action.microbatch == microbatches - 1
    )
    raise ScheduleError(
        f"rank {rank}, action {at} ({action}): every stage runs every microbatch, but no rank has {microbatches} "
        f"actions."
    )


# The most backwards that come after an action.
_BACKWARDS_AFTER = {
    **dict.fromkeys((ActionKind.REDUCE, ActionKind.AVERAGE), 1),
    **dict.fromkeys((ActionKind.AVERAGED, ActionKind.REDUCED, ActionKind.SUM_SEQUENCE, ActionKind.SUM_TIES), 0),
}
# Progress of a microbatch on a stage; 0 before its forward.
_FORWARD_DONE, _INPUT_GRADIENT_DONE, _ALL_DONE = 1, 2, 3
# Progress after an action, by its kind and the progress before.
_AFTER = {
    (ActionKind.FORWARD, 0): _FORWARD_DONE,
    (ActionKind.INPUT_GRADIENT, _FORWARD_DONE): _INPUT_GRADIENT_DONE,
    (ActionKind.WEIGHT_GRADIENT, _INPUT_GRADIENT_DONE): _ALL_DONE,
    (ActionKind.BACKWARD, _FORWARD_DONE): _ALL_DONE,
}


def _place(schedule: Schedule) -> dict[int, int]:
    placed: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for stage in {action[0] for action in actions}:
            if placed.setdefault(stage, rank) != rank:
                at, action = next((at, action) for at, action in enumerate(actions) if action.stage == stage)
                raise _broken(rank, at, action, f"stage {stage} is on rank {placed[stage]}; a stage is on one rank")
    return placed


def _check_rank(rank: int, actions: list[Action], done: list[bytearray]) -> None:
    for at, action in enumerate(actions):
        stage, kind, microbatch, _ = action
        progress = done[stage][microbatch] if microbatch >= 0 else -1
        if (kind, progress) in _AFTER:
            done[stage][microbatch] = _AFTER[kind, progress]
        elif kind not in ADDED:
            raise _broken(rank, at, action, _rule(action, progress))


def _check_added(rank: int, actions: list[Action]) -> None:
    """Check the actions of participants: gathers come before, and sums after what they are of."""
    gathered = {action.stage for action in actions if action.kind is ActionKind.GATHER}
    left = Counter(action.stage for action in actions if action.kind in BACKWARDS)
    whole: set[int] = set()
    begun: list[int] = []
    for at, action in enumerate(actions):
        stage, kind, *_ = action
        if kind in COMPUTE:
            left[stage] -= kind in BACKWARDS
            if stage in gathered and stage not in whole:
                raise _broken(rank, at, action, f"its parameters are not whole; {stage}GATHER comes before it")
        elif kind in BEGINS:
            begun.append(stage)
            whole |= {stage} if kind is ActionKind.GATHER else set()
        elif kind in ENDS:
            if not begun or begun.pop() != stage:
                raise _broken(rank, at, action, f"no exchange of stage {stage} has begun")
            whole -= {stage} if kind is ActionKind.RESHARD else set()
        # All stages of the rank, but for what is around an action of one stage.
        backwards = left[stage] if kind in (*BEGINS, *ENDS) else left.total()
        if kind in _BACKWARDS_AFTER and backwards > _BACKWARDS_AFTER[kind]:
            rule = f"{counted(backwards, 'backward comes', 'backwards come')} after it; a sum is of all of them"
            raise _broken(rank, at, action, rule)


def _rule(action: Action, progress: int) -> str:
    stage, kind, microbatch, _ = action
    if kind in TRANSFERS:
        return "a schedule has compute actions only (F, B, I, W); sends and receives follow from them"
    if progress < 0:
        return "microbatches are counted from 0"
    if kind is ActionKind.FORWARD:
        return "it ran before; each stage runs each microbatch once"
    if progress == 0:
        return f"a backward comes after its forward, {Action(stage, ActionKind.FORWARD, microbatch)}"
    if progress == _ALL_DONE:
        return "that backward ran before; each stage runs each microbatch once"
    if kind is ActionKind.WEIGHT_GRADIENT:
        return (
            f"a weight-gradient comes after its input-gradient, {Action(stage, ActionKind.INPUT_GRADIENT, microbatch)}"
        )
    return "its input-gradient ran before; each stage runs each microbatch once"


def _check_complete(done: list[bytearray], placed: dict[int, int], trains: bool) -> None:
    for stage, each in enumerate(done):
        for microbatch, progress in enumerate(each):
            if progress == _ALL_DONE or (progress == _FORWARD_DONE and not trains):
                continue
            missing = {
                0: (ActionKind.FORWARD, "every stage runs every microbatch"),
                _FORWARD_DONE: (ActionKind.BACKWARD, "every forward has its backward (B, or I and W)"),
                _INPUT_GRADIENT_DONE: (ActionKind.WEIGHT_GRADIENT, "every input-gradient has its weight-gradient"),
            }
            kind, rule = missing[progress]
            raise ScheduleError(f"rank {placed[stage]} lacks {Action(stage, kind, microbatch)}: {rule}.")


def _broken(rank: int, at: int, action: Action, rule: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, action {at} ({action}): {rule}.")
