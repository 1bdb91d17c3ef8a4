"""Building blocks, repeated and squeezed within a memory limit."""

import pytest

from nxdpp.schedules.check import check
from nxdpp.schedules.families.building_block import BuildingBlock, squeeze
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.placement import Placement
from nxdpp.schedules.simulate import in_flight_peaks, simulate


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("ranks", [24, 48])
def test_many_ranks(name: str, ranks: int) -> None:
    """Repetition of a block within its memory limit, for any number of ranks."""
    schedule = FAMILIES[name].build(ranks, ranks)

    check(schedule)
    assert max(in_flight_peaks(schedule)) <= 2 * {"v-half": (ranks + 2) // 2, "v-min": (ranks + 4) // 3}[name]


def test_more_memory_makes_a_shorter_schedule() -> None:
    """The block of V-Min in its own memory and in that of V-Half."""
    placement = Placement(8, 2, v_shaped=True)

    def block(rank: int) -> BuildingBlock:
        return BuildingBlock(rank, 15 - rank, 16 + rank, 31 - rank)

    tight, wide = (squeeze(placement, 32, block, most_in_flight=chunks) for chunks in (8, 10))

    assert max(in_flight_peaks(tight)) == 8
    assert 8 < max(in_flight_peaks(wide)) <= 10
    assert simulate(wide).makespan < simulate(tight).makespan
