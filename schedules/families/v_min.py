"""V-Min: two chunks a rank in a V, a third of the memory of 1F1B (Qi et al., arXiv 2405.15362).

p = 4, 8 microbatches; small letters are the first chunk::

    rank 0  f0 f1 f2 .  .  .  .  F0 I0 W0 F1 I1 W1 f3 .  i0 w0 .  .  F2 I2 i1 W2 f4 w1 F3 I3 i2 W3 f5 ...
    rank 1  .  f0 f1 .  .  .  F0 .  F1 I0 W0 f2 I1 W1 i0 f3 w0 .  F2 .  i1 I2 w1 W2 F3 f4 i2 I3 w2 W3 ...
    rank 2  .  .  f0 f1 .  F0 .  F1 .  .  I0 W0 f2 i0 I1 w0 W1 F2 f3 i1 w1 .  I2 F3 W2 i2 f4 w2 I3 F4 ...
    rank 3  .  .  .  f0 F0 f1 F1 .  .  .  .  I0 i0 W0 f2 w0 F2 I1 i1 W1 f3 w1 F3 I2 i2 W2 w2 f4 F4 I3 ...

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
