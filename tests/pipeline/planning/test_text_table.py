"""Plain tables: alignment, gaps, and sizes with four digits."""

import re

import pytest

from nxdpp.pipeline.planning.text_table import bytes_text, table


def test_columns_are_as_wide_as_their_cells() -> None:
    assert table(("rank", "bytes"), [["0", "12"], ["total", "123456"]], total=True) == [
        "rank    bytes",
        "-------------",
        "0          12",
        "-------------",
        "total  123456",
    ]


@pytest.mark.parametrize(
    ("last", "found", "gaps"), [(36, 80, [2, 2]), (37, 80, [2, 1]), (38, 80, [1, 1]), (39, 81, [1, 1])]
)
def test_a_wide_table_has_smaller_gaps(last: int, found: int, gaps: list[int]) -> None:
    """Two spaces while they fit in 80 columns, then one, and two after the first column where that fits."""
    rows = [["x" * 4, "y" * 36, "z" * last]]

    lines = table(("a", "b", "c"), rows)

    assert len(lines[2]) == found
    assert lines[2].split() == rows[0]
    assert [len(gap) for gap in re.findall(" +", lines[2])] == gaps


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.000 KiB"),
        (48.835 * 2**30, "48.84 GiB"),
        (176 * 2**30, "176.0 GiB"),
        (1023 * 2**30, "1023 GiB"),
        (1023.7 * 2**30, "1.000 TiB"),
        (5.906 * 2**40, "5.906 TiB"),
        (2048 * 2**50, "2048 PiB"),
    ],
)
def test_sizes_have_four_digits(size: float, text: str) -> None:
    assert bytes_text(size) == text
