"""Forward only, for evaluation: every stage runs its microbatches in order.

::

    rank 0  F0 F1 F2 F3
    rank 1     F0 F1 F2 F3
"""

from nxdpp.schedules.actions import Action, ActionKind, Schedule


def forward_only(stages: int, microbatches: int) -> Schedule:
    """The compute actions of each rank, stage ``s`` being on rank ``s``."""
    return [
        [Action(stage, ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)] for stage in range(stages)
    ]
