"""Drawings in a terminal of any width, with and without colour."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.drawing import draw


def _lines(timeline: Timeline, width: int) -> list[str]:
    """Return the lines on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(draw(timeline, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def _rows(lines: list[str], ranks: int) -> list[str]:
    """Return each rank's row, with its blocks joined."""
    rows = [""] * ranks
    for line in lines:
        if match := re.match(r"rank (\d+) +", line):
            rows[int(match[1])] += line[match.end() :]
    return rows


def test_the_drawing_of_two_ranks() -> None:
    lines = _lines(simulate(FAMILIES["1f1b"].build(2, 2)), 80)

    assert [line.rstrip() for line in lines] == [
        "F0 forward  B0 backward  . bubble",
        "",
        "time 0",
        "rank 0  F0 F1 .  .  B0--- .  B1---",
        "rank 1  .  F0 B0--- F1 B1--- .  .",
        "",
    ]


@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 12),
    microbatches=st.integers(1, 16),
    width=st.integers(20, 200),
)
@settings(deadline=None, max_examples=60)
def test_every_width_shows_every_action_once_and_no_line_is_broken(
    name: str, ranks: int, microbatches: int, width: int
) -> None:
    timeline = simulate(FAMILIES[name].build(ranks, microbatches))

    lines = _lines(timeline, width)

    assert max(map(len, lines)) <= width
    blocks = sum(line.startswith("time ") for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == blocks * ranks
    for row, spans in zip(_rows(lines, ranks), timeline.spans, strict=True):
        shown = re.findall(r"[FBIWfbiw]\d+", row)
        # An action that continues in the next block has its label there again.
        once = [label for at, label in enumerate(shown) if at == 0 or shown[at - 1] != label]
        assert [label.upper() for label in once] == [
            f"{span.action.kind.value}{span.action.microbatch}" for span in spans
        ]


def test_blocks_have_their_start_time() -> None:
    lines = _lines(simulate(FAMILIES["1f1b"].build(2, 8)), 40)

    assert [line for line in lines if line.startswith("time")] == ["time 0", "time 10", "time 20"]


def test_lines_are_short_for_widely_different_times() -> None:
    timeline = simulate(FAMILIES["zb-v"].build(4, 8), forward=1e-6, weight_gradient=0.7)
    slow = simulate(FAMILIES["1f1b"].build(2, 2), transfer=1e6)

    assert max(map(len, _rows(_lines(timeline, 100), 4))) < 1000
    assert max(map(len, _rows(_lines(slow, 100), 2))) <= 20 * 8 * len("F0 ")


def test_times_of_zero() -> None:
    assert "rank 1" in "\n".join(_lines(simulate(FAMILIES["1f1b"].build(2, 2), 0, 0, 0), 80))


@pytest.mark.parametrize(("name", "colours"), [("1f1b", 2), ("zb-h1", 3), ("interleaved", 4), ("zb-v", 6)])
def test_each_kind_and_the_first_chunk_have_their_own_colour(name: str, colours: int) -> None:
    text = draw(simulate(FAMILIES[name].build(4, 8)), 100)

    styles = {str(span.style) for span in text.spans if span.end > text.plain.index("time")}

    assert len(styles - {"dim"}) == colours


def test_ranks_of_two_digits_stay_in_line() -> None:
    lines = _lines(simulate(FAMILIES["1f1b"].build(12, 2)), 60)

    assert "rank 0   F0" in lines[3]
    assert len({len(line) for line in lines[3:15]}) == 1
