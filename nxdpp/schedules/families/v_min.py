"""V-Min: two chunks per rank in a V, a third of the memory of 1F1B (Qi et al., arXiv 2405.15362).

p = 4, 8 microbatches::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  f0 f1 f2 .  .  .  .  F0 I0 W0 F1 I1 W1 f3 .  i0 w0 .  .  F2 I2 i1 W2 f4 w1 F3 I3 i2 W3 f5
    rank 1  .  f0 f1 .  .  .  F0 .  F1 I0 W0 f2 I1 W1 i0 f3 w0 .  F2 .  i1 I2 w1 W2 F3 f4 i2 I3 w2 W3
    rank 2  .  .  f0 f1 .  F0 .  F1 .  .  I0 W0 f2 i0 I1 w0 W1 F2 f3 i1 w1 .  I2 F3 W2 i2 f4 w2 I3 F4
    rank 3  .  .  .  f0 F0 f1 F1 .  .  .  .  I0 i0 W0 f2 w0 F2 I1 i1 W1 f3 w1 F3 I2 i2 W2 w2 f4 F4 I3

    slot    |30            |35            |40            |45            |50            |55
    rank 0  w2 F4 I4 i3 W4 f6 w3 F5 I5 i4 W5 f7 w4 F6 I6 i5 W6 w5 .  F7 I7 i6 W7 w6 .  .  .  i7 w7
    rank 1  F4 f5 i3 I4 w3 W4 F5 f6 i4 I5 w4 W5 F6 f7 i5 I6 w5 W6 F7 .  i6 I7 w6 W7 .  .  i7 w7 .
    rank 2  W3 i3 f5 w3 I4 F5 W4 i4 f6 w4 I5 F6 W5 i5 f7 w5 I6 F7 W6 i6 w6 .  I7 W7 .  i7 w7 .  .
    rank 3  i3 W3 w3 f5 F5 I4 i4 W4 w4 f6 F6 I5 i5 W5 w5 f7 F7 I6 i6 W6 w6 .  .  I7 i7 W7 w7 .  .

    F forward, I input-gradient, W weight-gradient, . bubble, small letters: first chunk of a rank

A squeezed building block (see ``building_block``): a microbatch passes through both chunks, forward and back, without
a pause. At most (p + 4) // 3 microbatches are in flight, counted in full ranks.
"""

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.families.building_block import BuildingBlock, squeeze
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.placement import Placement


def _all(placement: Placement, microbatches: int) -> Schedule:
    ranks = placement.ranks
    # Keeps two actions of a rank out of one slot.
    apart = 2 if ranks % 3 == 0 else 0

    def block(rank: int) -> BuildingBlock:
        return BuildingBlock(rank, 2 * ranks - 1 - rank, 2 * ranks + apart + rank, 4 * ranks - 1 + apart - rank)

    return squeeze(placement, microbatches, block, most_in_flight=2 * ((ranks + 4) // 3))


V_MIN = Family("v-min", "two chunks in a V, a third of the memory of 1F1B", _all, default_chunks=2, v_shaped=True)
