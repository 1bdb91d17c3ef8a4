"""1F1B: one forward, one backward (PipeDream-Flush; Narayanan et al., arXiv 2006.09503).

Stage s of p runs p - s - 1 warm-up forwards, then alternates, then drains. p = 4, 8 microbatches, a backward takes
two slots::

    slot    |0             |5             |10            |15            |20            |25            |30
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7
    rank 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7 .  .
    rank 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7 .  .  .  .
    rank 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7 .  .  .  .  .  .

    F forward, B backward, . bubble

At most p - s microbatches are in flight on stage s.
"""

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


def alternate(stage: int, warm_up: int, microbatches: int) -> list[Action]:
    """Return ``warm_up`` forwards of ``stage``, then one forward, one backward, then the backwards that are left."""
    forwards = [Action(stage, ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(stage, ActionKind.BACKWARD, microbatch) for microbatch in range(microbatches)]
    warm_up = min(warm_up, microbatches)
    steady = microbatches - warm_up
    alternating = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return forwards[:warm_up] + alternating + backwards[steady:]


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    return alternate(rank, placement.ranks - rank - 1, microbatches)


ONE_FORWARD_ONE_BACKWARD = Family("1f1b", "one forward, one backward", each_rank(_rank))
