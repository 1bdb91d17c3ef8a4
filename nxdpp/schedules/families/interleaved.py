"""Interleaved 1F1B: several chunks per rank, placed in a loop (Narayanan et al., arXiv 2104.04473).

A chunk takes 1/v of the time of a rank's layers, so the bubble is 1/v of 1F1B's. p = 2, v = 2, 4 microbatches, a
backward takes two slots::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  f0 f1 F0 F1 f2 .  B0 B0 f3 B1 B1 F2 b0 b0 F3 b1 b1 .  B2 B2 .  B3 B3 b2 b2 b3 b3
    rank 1  .  f0 f1 F0 B0 B0 F1 B1 B1 f2 b0 b0 f3 b1 b1 F2 B2 B2 F3 B3 B3 b2 b2 b3 b3 .  .

    F forward, B backward, . bubble, small letters: first chunk of a rank

``chunk_groups`` has the order of the microbatches; g is the size of its largest group. Rank r runs
2 (p - r - 1) + (v - 1) g warm-up forwards and holds one chunk more. With one chunk per rank this is 1F1B.
"""

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.chunk_groups import backward_order, forward_order, group_sizes
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    ranks, chunks = placement.ranks, placement.chunks
    stages = placement.stages_of(rank)
    order = forward_order(ranks, chunks, microbatches)
    forwards = [Action(stages[chunk], ActionKind.FORWARD, microbatch) for chunk, microbatch in order]
    backwards = [
        Action(stages[chunk], ActionKind.BACKWARD, microbatch) for chunk, microbatch in backward_order(order, chunks)
    ]
    hops = (ranks - rank - 1) * (1 if chunks == 1 else 2)
    warm_up = min(hops + (chunks - 1) * group_sizes(ranks, microbatches)[0], len(forwards))
    steady = len(forwards) - warm_up
    alternating = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return forwards[:warm_up] + alternating + backwards[steady:]


INTERLEAVED = Family(
    "interleaved", "1F1B over several chunks per rank", each_rank(_rank), default_chunks=2, any_chunks=True
)
