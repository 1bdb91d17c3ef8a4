"""V-Half: two chunks per rank in a V, half the memory of 1F1B (Qi et al., arXiv 2405.15362).

p = 4, 8 microbatches::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  f0 f1 f2 f3 f4 .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 i0 f5 w0 F3 I3 W3 i1 f6 w1 F4 I4 W4 i2 f7
    rank 1  .  f0 f1 f2 f3 .  F0 .  F1 I0 W0 F2 I1 W1 f4 i0 I2 w0 F3 W2 f5 i1 I3 w1 F4 W3 f6 i2 I4 w2
    rank 2  .  .  f0 f1 f2 F0 .  F1 .  F2 I0 W0 f3 I1 i0 W1 w0 F3 f4 I2 i1 W2 w1 F4 f5 I3 i2 W3 w2 F5
    rank 3  .  .  .  f0 F0 f1 F1 f2 F2 .  .  I0 i0 W0 f3 w0 F3 I1 i1 W1 f4 w1 F4 I2 i2 W2 f5 w2 F5 I3

    slot    |30            |35            |40            |45            |50
    rank 0  w2 F5 I5 W5 i3 w3 .  F6 I6 W6 i4 w4 .  F7 I7 i5 W7 i6 w5 w6 .  i7 w7
    rank 1  F5 W4 f7 i3 I5 w3 F6 W5 .  i4 I6 w4 F7 W6 i5 I7 i6 w5 W7 w6 i7 w7 .
    rank 2  f6 I4 i3 W4 w3 F6 f7 I5 i4 W5 w4 F7 I6 i5 W6 i6 I7 w5 w6 i7 W7 w7 .
    rank 3  i3 W3 f6 w3 F6 I4 i4 W4 f7 w4 F7 I5 i5 I6 i6 W5 w5 I7 i7 W6 w6 W7 w7

    F forward, I input-gradient, W weight-gradient, . bubble, small letters: first chunk of a rank

A squeezed building block (see ``building_block``): the first chunk's forward takes two slots per rank, the others
one. At most (p + 2) // 2 microbatches are in flight, counted in full ranks.
"""

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.families.building_block import BuildingBlock, squeeze
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.placement import Placement


def _all(placement: Placement, microbatches: int) -> Schedule:
    ranks = placement.ranks
    # Keeps two actions of a rank out of one slot.
    apart = 3 if ranks % 2 == 0 else 0

    def block(rank: int) -> BuildingBlock:
        return BuildingBlock(
            2 * rank, 3 * ranks - 2 - rank, 3 * ranks - 1 + apart + 2 * rank, 6 * ranks - 2 + apart - rank
        )

    return squeeze(placement, microbatches, block, most_in_flight=2 * ((ranks + 2) // 2))


V_HALF = Family("v-half", "two chunks in a V, half the memory of 1F1B", _all, default_chunks=2, v_shaped=True)
