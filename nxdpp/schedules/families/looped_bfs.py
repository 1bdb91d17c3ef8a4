"""Looped breadth-first: all microbatches pass through a chunk before the next one (Lamy-Poirier, arXiv 2211.05953).

p = 2, v = 2, 4 microbatches, a backward takes two slots::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  f0 f1 f2 f3 F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 b0 b0 b1 b1 b2 b2 b3 b3
    rank 1  .  f0 f1 f2 f3 F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 b0 b0 b1 b1 b2 b2 b3 b3 .  .

    F forward, B backward, . bubble, small letters: first chunk of a rank

Each chunk has the order of GPipe: with one chunk per rank this is GPipe. Each chunk has its last backward early:
chunk c after (v - c) / v of the backwards. The exchange of its gradients between replicas hides behind the chunks
before it. All microbatches are in flight at once. With at least p microbatches the bubble is as in interleaved 1F1B.
Backwards run in the order of the microbatches, as in the other families.
"""

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    stages = placement.stages_of(rank)
    forwards = [Action(stage, ActionKind.FORWARD, each) for stage in stages for each in range(microbatches)]
    backwards = [Action(stage, ActionKind.BACKWARD, each) for stage in reversed(stages) for each in range(microbatches)]
    return forwards + backwards


LOOPED_BFS = Family(
    "looped-bfs", "all microbatches chunk after chunk: early gradients", each_rank(_rank), 2, any_chunks=True
)
