"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965).

p = 4, 4 microbatches, a backward takes two slots::

    slot    |0             |5             |10            |15            |20
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 2  .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .

    F forward, B backward, . bubble

All microbatches are in flight at once. Backwards run in the order of the microbatches, as in the other families. So
gradients are summed in the same order.
"""

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    return [
        Action(rank, kind, microbatch)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for microbatch in range(microbatches)
    ]


GPIPE = Family("gpipe", "all forwards, then all backwards", each_rank(_rank))
