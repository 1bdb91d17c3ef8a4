"""ZB1P: interleaved 1F1B with a split backward (Qi et al., arXiv 2401.10241, on arXiv 2104.04473).

p = 2, v = 2, 4 microbatches::

    slot    |0             |5             |10            |15            |20
    rank 0  f0 f1 F0 F1 .  I0 W0 f2 I1 W1 f3 i0 w0 F2 i1 w1 F3 I2 W2 I3 W3 i2 w2 i3 w3
    rank 1  .  f0 f1 F0 I0 F1 I1 W0 f2 i0 W1 f3 i1 w0 F2 I2 w1 F3 I3 W2 i2 W3 i3 w2 w3

    F forward, I input-gradient, W weight-gradient, . bubble, small letters: first chunk of a rank

Forwards and input-gradients have the order of interleaved 1F1B, with one warm-up forward a hop in place of two: an
input-gradient is as short as a forward. Rank r delays its weight-gradients by r microbatches, as in ZB-H1. Every rank
holds p + (v - 1) g chunks, where g is the size of the largest group of ``chunk_groups``. With one chunk per rank this
is ZB-H1.
"""

from nxdpp.schedules.actions import Action
from nxdpp.schedules.families.chunk_groups import forward_order, group_sizes
from nxdpp.schedules.families.delayed_weights import delay_weights
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    ranks, chunks = placement.ranks, placement.chunks
    warm_up = ranks - rank + (chunks - 1) * group_sizes(ranks, microbatches)[0]
    order = forward_order(ranks, chunks, microbatches)
    return delay_weights(placement.stages_of(rank), order, warm_up, delay=rank)


ZB1P = Family("zb1p", "interleaved 1F1B with split backward", each_rank(_rank), default_chunks=2, any_chunks=True)
