"""The table of families in docs/schedules.md is that of the simulator."""

from pathlib import Path

import pytest

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
LINES = PAGE.read_text().splitlines()
ROWS = [line.split("|")[1:-1] for line in LINES if line.startswith("| `") and line.count("|") == 9]


def test_the_table_has_all_families() -> None:
    assert [row[0].strip(" `") for row in ROWS] == list(FAMILIES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_the_figures_of_a_family(row: list[str]) -> None:
    name, chunks, placement, makespan, bubble, with_transfer, peak, _ = (cell.strip(" `") for cell in row)
    family = FAMILIES[name]
    v = family.default_chunks
    schedule = family.build(8, 32)
    alone, transferred = (simulate(schedule, 1 / v, 1 / v, 1 / v, transfer) for transfer in (0.0, 0.1))

    assert chunks == (f"1 or more ({v})" if family.any_chunks else str(v))
    assert placement == ("V" if family.v_shaped else "loop")
    assert alone.makespan == pytest.approx(float(makespan))
    assert f"{alone.mean_bubble:.1%}" == bubble.replace(" ", "")
    assert f"{transferred.mean_bubble:.1%}" == with_transfer.replace(" ", "")
    assert max(alone.peaks) == float(peak)
