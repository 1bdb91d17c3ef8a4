"""Tables of figures in terminals of any width."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nxdpp.schedules.view.tables import figures_tables

NUMBERS = st.integers(0, 10**9).map(str)
PERCENTS = st.floats(0, 100).map(lambda share: f"{share:.1f} %")
LISTS = st.lists(st.integers(0, 9999), min_size=1, max_size=8).map(lambda stages: ", ".join(map(str, stages)))
COLUMNS = ("rank", "stages", "bubble", "sim. bubble", "computed", "sim. time", "waited", "sends", "other")
ROWS = st.lists(st.tuples(NUMBERS, LISTS, PERCENTS, PERCENTS, *[NUMBERS] * 5), min_size=1, max_size=6)


def _lines(columns: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    for table in figures_tables(columns, rows, width, "a caption of words"):
        console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]  # a StringIO


@pytest.mark.one_python
@settings(deadline=None, max_examples=40)
@given(rows=ROWS, width=st.integers(40, 120))
def test_no_number_and_no_heading_is_cut_or_broken(rows: list[tuple[str, ...]], width: int) -> None:
    lines = _lines(COLUMNS, rows, width)

    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace("│", " ").split()
    for row in rows:
        for cell in row:
            assert all(word in words for word in cell.split())
    for name in COLUMNS:
        for word in name.split():
            assert word in " ".join(lines).replace("┃", " ").split()
    assert "…" not in words


def test_a_wide_table_has_a_frame_and_a_narrow_one_is_divided() -> None:
    row = ("0", "0, 8", "12.5 %", "11.0 %", "1000000", "1000000", "2000000", "3000000", "4000000")

    assert _lines(COLUMNS, [row], 96)[0].startswith("┏")
    lines = _lines(COLUMNS, [row], 40)
    # The last line of each heading, and the row of each.
    shown = [line.split() for line in lines if set(line.split()) & {"rank", "0"}]
    assert shown == [
        ["rank", "stages", "bubble", "bubble", "computed"],
        ["0", "0,", "8", "12.5", "%", "11.0", "%", "1000000"],
        ["rank", "sim.", "time", "waited", "sends"],
        ["0", "1000000", "2000000", "3000000"],
        ["rank", "other"],
        ["0", "4000000"],
    ]
