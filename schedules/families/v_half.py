"""V-Half: two chunks a rank in a V, half the memory of 1F1B (Qi et al., arXiv 2405.15362).

p = 4, 8 microbatches; small letters are the first chunk::

    rank 0  f0 f1 f2 f3 f4 .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 i0 f5 w0 F3 I3 W3 i1 f6 w1 F4 I4 W4 i2 f7 ...
    rank 1  .  f0 f1 f2 f3 .  F0 .  F1 I0 W0 F2 I1 W1 f4 i0 I2 w0 F3 W2 f5 i1 I3 w1 F4 W3 f6 i2 I4 w2 ...
    rank 2  .  .  f0 f1 f2 F0 .  F1 .  F2 I0 W0 f3 I1 i0 W1 w0 F3 f4 I2 i1 W2 w1 F4 f5 I3 i2 W3 w2 F5 ...
    rank 3  .  .  .  f0 F0 f1 F1 f2 F2 .  .  I0 i0 W0 f3 w0 F3 I1 i1 W1 f4 w1 F4 I2 i2 W2 f5 w2 F5 I3 ...

A squeezed building block (see ``building_block``): the first chunk's forward takes two slots a rank, the others
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
