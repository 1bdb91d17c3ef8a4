"""Tables of figures in terminals of any width."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nxdpp.schedules.view.tables import NARROWEST, tables

NUMBERS = st.integers(0, 10**9).map(str)
PERCENTS = st.floats(0, 100).map(lambda share: f"{share:.1f} %")
LISTS = st.lists(st.integers(0, 9999), min_size=1, max_size=8).map(lambda stages: ", ".join(map(str, stages)))
COLUMNS = ("rank", "stages", "bubble", "sim. bubble", "computed", "sim. time", "waited", "sends", "other")
ROWS = st.lists(st.tuples(NUMBERS, LISTS, PERCENTS, PERCENTS, *[NUMBERS] * 5), min_size=1, max_size=6)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, **more: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    for table in tables(columns, rows, width, **more):
        console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]  # a StringIO


@settings(deadline=None, max_examples=40)
@given(rows=ROWS, width=st.integers(40, 120))
def test_no_number_and_no_heading_is_cut_or_broken(rows: list[tuple[str, ...]], width: int) -> None:
    lines = _lines(COLUMNS, rows, width)

    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in rows:
        for cell in row:
            assert all(word in words for word in cell.split())
    for name in COLUMNS:
        for word in name.split():
            assert word in words
    assert "…" not in words


def test_a_narrow_table_is_divided() -> None:
    row = ("0", "0, 8", "12.5 %", "11.0 %", "1000000", "1000000", "2000000", "3000000", "4000000")

    assert len(_lines(COLUMNS, [row], 96)) == 3
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


def test_columns_are_as_wide_as_their_cells() -> None:
    assert _lines(("rank", "bytes"), [["0", "12"], ["total", "123456"]], 80, total=True) == [
        "rank    bytes",
        "-------------",
        "0          12",
        "-------------",
        "total  123456",
    ]


@pytest.mark.parametrize(("last", "found", "gap"), [(36, 80, 2), (37, 79, 1), (38, 80, 1)])
def test_a_wide_table_has_smaller_gaps(last: int, found: int, gap: int) -> None:
    """Two spaces while they fit into the terminal, then one."""
    rows = [["x" * 4, "y" * 36, "z" * last]]

    lines = _lines(("a", "b", "c"), rows, 80)

    assert len(lines[2]) == found
    assert lines[2].split() == rows[0]
    assert {len(spaces) for spaces in re.findall(" +", lines[2])} == {gap}


def test_a_long_name_is_folded_and_its_figures_are_whole() -> None:
    name = "n" * 50

    lines = _lines(("tensor", "bytes"), [[name, "123456"]], 40, folded=0)

    assert max(map(len, lines)) <= 40
    assert "".join(lines[2:]).replace(" ", "").replace("123456", "") == name
    assert len(_lines(("tensor", "bytes"), [[name, "123456"]], NARROWEST + 8, folded=0)[0]) <= NARROWEST + 8
