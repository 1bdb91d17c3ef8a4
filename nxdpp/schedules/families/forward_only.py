"""Only forwards, for evaluation, on either placement.

In a loop, in the order of interleaved 1F1B; p = 2, v = 2, 4 microbatches::

    slot    |0             |5
    rank 0  f0 f1 F0 F1 f2 f3 F2 F3 .
    rank 1  .  f0 f1 F0 F1 f2 f3 F2 F3

    F forward, . bubble, small letters: first chunk of a rank

In a V, a microbatch enters every v slots; p = 3, v = 2, 5 microbatches::

    slot    |0             |5             |10
    rank 0  f0 f1 f2 .  .  F0 f3 F1 f4 F2 .  F3 .  F4
    rank 1  .  f0 f1 .  F0 f2 F1 f3 F2 f4 F3 .  F4 .
    rank 2  .  .  f0 F0 f1 F1 f2 F2 f3 F3 f4 F4 .  .

    F forward, . bubble, small letters: first chunk of a rank
"""

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.families.chunk_groups import forward_order
from nxdpp.schedules.placement import ListedPlacement, Placement


def evaluation(placement: Placement | ListedPlacement, microbatches: int) -> Schedule:
    """Return the compute actions of all ranks on any placement."""
    if isinstance(placement, Placement):
        return forward_only(placement, microbatches)
    return [
        [
            Action(stage, ActionKind.FORWARD, microbatch)
            for microbatch in range(microbatches)
            for stage in placement.stages_of(rank)
        ]
        for rank in range(placement.ranks)
    ]


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Return the compute actions of all ranks."""
    order = forward_order(placement.ranks, placement.chunks, microbatches)
    schedule = []
    for rank in range(placement.ranks):
        looped = [(placement.stage(rank, chunk), microbatch) for chunk, microbatch in order]
        steps = _v_order(placement, rank, microbatches) if placement.v_shaped else looped
        schedule.append([Action(stage, ActionKind.FORWARD, microbatch) for stage, microbatch in steps])
    return schedule


def _v_order(placement: Placement, rank: int, microbatches: int) -> list[tuple[int, int]]:
    """Order by the slot s + v j of stage s and microbatch j, so that no microbatch overtakes another."""
    slots = sorted(
        (stage + placement.chunks * microbatch, stage, microbatch)
        for stage in placement.stages_of(rank)
        for microbatch in range(microbatches)
    )
    return [(stage, microbatch) for _, stage, microbatch in slots]
