"""Forward only, for evaluation, on each placement.

Stages placed in a loop, in the order of interleaved 1F1B; p = 2, v = 2, 4 microbatches, small letters are the first
chunk::

    rank 0  f0 f1 F0 F1 f2 f3 F2 F3 .
    rank 1  .  f0 f1 F0 F1 f2 f3 F2 F3

In a V, a microbatch enters every v slots, and turns around on the last rank; p = 3, v = 2, 5 microbatches::

    rank 0  f0 f1 f2 .  .  F0 f3 F1 f4 F2 .  F3 ...
    rank 1  .  f0 f1 .  F0 f2 F1 f3 F2 f4 F3 . ...
    rank 2  .  .  f0 F0 f1 F1 f2 F2 f3 F3 f4 F4
"""

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.families.chunk_groups import forward_order
from nxdpp.schedules.placement import Placement


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """The compute actions of all ranks."""
    return [forward_only_rank(placement, rank, microbatches) for rank in range(placement.ranks)]


def forward_only_rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    """Those of one rank alone."""
    if placement.v_shaped:
        steps = _v_order(placement, rank, microbatches)
    else:
        order = forward_order(placement.ranks, placement.chunks, microbatches)
        steps = [(placement.stage(rank, chunk), microbatch) for chunk, microbatch in order]
    return [Action(stage, ActionKind.FORWARD, microbatch) for stage, microbatch in steps]


def _v_order(placement: Placement, rank: int, microbatches: int) -> list[tuple[int, int]]:
    """Stage s runs microbatch j at slot s + v j, so that a microbatch is never overtaken by a later one."""
    slots = sorted(
        (stage + placement.chunks * microbatch, stage, microbatch)
        for stage in placement.stages_of(rank)
        for microbatch in range(microbatches)
    )
    return [(stage, microbatch) for _, stage, microbatch in slots]
