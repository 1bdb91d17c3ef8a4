"""1F1B: one forward, one backward (PipeDream-Flush; Narayanan et al., arXiv 2006.09503).

Stage s of p runs p - s - 1 forwards to warm up, then alternates, then drains. p = 4, 8 microbatches, a
backward taking two slots::

    rank 0  F0 F1 F2 F3 .  .  .  .  .  B0 B0 F4 B1 B1 F5 ...
    rank 1     F0 F1 F2 .  .  .  B0 B0 F3 B1 B1 F4 ...
    rank 2        F0 F1 .  B0 B0 F2 B1 B1 F3 ...
    rank 3           F0 B0 B0 F1 B1 B1 F2 ...

At most p - s microbatches are live on stage s.
"""

from nxdpp.schedules.actions import Action, ActionKind, Schedule


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """The compute actions of each rank, stage ``s`` being on rank ``s``."""
    return [_stage(stage, stages, microbatches) for stage in range(stages)]


def _stage(stage: int, stages: int, microbatches: int) -> list[Action]:
    forwards = [Action(stage, ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(stage, ActionKind.BACKWARD, microbatch) for microbatch in range(microbatches)]
    warm_up = min(stages - stage - 1, microbatches)
    steady = microbatches - warm_up
    alternating = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return forwards[:warm_up] + alternating + backwards[steady:]
