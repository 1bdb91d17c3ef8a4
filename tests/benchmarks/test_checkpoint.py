"""The benchmark of checkpoints, with a small model."""

from math import nan
from pathlib import Path

import pytest

from benchmarks import checkpoint
from benchmarks.stored.measured import Measured, Rank
from benchmarks.stored.ways import WAYS, Ours


def test_each_way_saves_and_loads_and_the_page_has_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    names = (checkpoint.SAVES, checkpoint.LOADS, checkpoint.STEPS)
    blocks = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in names]
    page.write_text("\n".join(blocks))
    checkpoint.main(["--quick", "--write", str(page), "--folder", str(tmp_path)])
    text = page.read_text()
    for way in WAYS[False]:
        contents = sum(way in ways for ways in WAYS.values())
        assert text.count(f"| {way.title} ") == contents * (1 + way.loads)
    assert "on the disk (s)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_a_row_has_the_slowest_rank_and_the_largest_peak() -> None:
    ranks = [
        Rank(
            1_000_000_000,
            {Ours.title: Measured(1, 2, 5e6, 4, 3, 7e6), "other": Measured(0.5, 8, 1e6, 2, 12, 2e6)},
            alone=0.5,
            beside=0.75,
        ),
        Rank(
            3_000_000_000,
            {Ours.title: Measured(0.5, 4, 3e6, 5, 6, 1e6), "other": Measured(3, 6, 9e6, 10, 1, 8e6)},
            alone=0.25,
            beside=1,
        ),
    ]
    rows = checkpoint.rows_of("weights", ranks)
    saved = ["weights, 4000 MB", "2"]
    assert rows == {
        checkpoint.SAVES: [
            [*saved, "nxdpp", "1.000", "4.000", "1.00", "1.00", "5"],
            [*saved, "other", "3.000", "8.000", "2.00", "0.50", "9"],
        ],
        checkpoint.LOADS: [
            [*saved, "nxdpp", "5.000", "1.00", "6.000", "1.00", "0.67", "7"],
            [*saved, "other", "10.000", "2.00", "12.000", "2.00", "0.33", "8"],
        ],
        checkpoint.STEPS: [[*saved, "0.500", "1.000", "2.00"]],
    }


def test_a_way_that_is_not_loaded_has_no_row_of_loads() -> None:
    rows = checkpoint.rows_of("weights", [Rank(1, {Ours.title: Measured(1, 1, 0)}, nan, nan)])
    assert [len(found) for found in rows.values()] == [1, 0, 0]
