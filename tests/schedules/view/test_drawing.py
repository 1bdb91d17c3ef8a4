"""Drawings in a terminal of any width, with and without colour."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import AVERAGE, SHARDS_ONCE_A_STEP, add
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.drawing import draw
from nxdpp.schedules.view.labels import Labels

LEGEND = "time: a rank's forward takes 1"


def _lines(timeline: Timeline, width: int) -> list[str]:
    """Return the lines on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(draw(timeline, width, LEGEND))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]  # a StringIO


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
        "F0 forward  B0 backward  . bubble  - goes on  time: a rank's forward takes 1",
        "",
        "time    |0 |1 |2 |3 |4 |5 |6 |7 |8",
        "rank 0  F0 F1 .  .  B0--- .  B1---",
        "rank 1  .  F0 B0--- F1 B1--- .  .",
        "",
    ]


def test_more_than_two_chunks_have_letters_of_their_own() -> None:
    lines = _lines(simulate(FAMILIES["interleaved"].build(2, 2, 3)), 80)

    assert lines[0].startswith("F0a F0b F0c forward  B0a B0b B0c backward  . bubble  a to c: chunk of a rank")
    assert lines[4].startswith("rank 0  F0a F1a F0b F1b F0c F1c .   .   B0c---- .   B1c----")


@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 16),
    microbatches=st.integers(1, 20),
    chunks=st.integers(1, 4),
    transfer=st.sampled_from([0.0, 0.0, 0.1, 0.7]),
    width=st.integers(40, 200),
)
@settings(deadline=None, max_examples=60)
def test_every_width_shows_every_action_once_and_no_line_is_broken(
    name: str, ranks: int, microbatches: int, chunks: int, transfer: float, width: int
) -> None:
    family = FAMILIES[name]
    timeline = simulate(
        family.build(ranks, microbatches, chunks if family.any_chunks else None), transfer=transfer
    )  # fmt: skip
    labels = Labels(timeline.spans)

    lines = _lines(timeline, width)

    assert max(map(len, lines)) <= width
    blocks = sum(line.startswith("time  ") for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == blocks * ranks
    for row, spans in zip(_rows(lines, ranks), timeline.spans, strict=True):
        shown = re.findall(r"[FBIWfbiw]\d+[a-d]?", row)
        assert shown == [labels.label(span.action) for span in spans]
    assert "too short" not in "".join(lines)
    assert "letter alone" not in "".join(lines)


@given(
    name=st.sampled_from(["1f1b", "zb-v", "interleaved"]),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    times=st.lists(st.floats(0, 1000, allow_subnormal=False), min_size=36, max_size=36),
    width=st.integers(40, 120),
)
@settings(deadline=None, max_examples=60)
def test_any_times_show_or_count_every_action(
    name: str, ranks: int, microbatches: int, times: list[float], width: int
) -> None:
    schedule = FAMILIES[name].build(ranks, microbatches)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    timeline = simulate(schedule, times[:stages], times[12 : 12 + stages], times[24 : 24 + stages], times[0] / 10)

    lines = _lines(timeline, width)

    assert max(map(len, lines)) <= width
    rows = "".join(_rows(lines, ranks))
    whole = set(re.findall(r"[FBIWfbiw]\d+", rows))
    assert whole <= {Labels(timeline.spans).label(span.action) for spans in timeline.spans for span in spans}
    counted = re.search(r"too short to draw: ([^a-z]+)", "\n".join(lines))
    missing = sum(map(int, re.findall(r"\d+", counted[1]))) if counted else 0
    assert len(re.findall("[FBIWfbiw]", rows)) + missing == sum(map(len, timeline.spans))


def test_actions_are_below_the_ticks_of_their_times() -> None:
    timeline = simulate(FAMILIES["zb-v"].build(4, 8), 0.5, 0.5, 0.5)
    lines = _lines(timeline, 60)

    times: dict[int, list[float]] = {rank: [] for rank in range(4)}
    for at, line in enumerate(lines):
        if line.startswith("time  "):
            ticks = [(match.start(), float(match[1])) for match in re.finditer(r"\|(\S+)", line)]
            (first, begin), (second, end) = ticks[0], ticks[1]
            for rank in range(4):
                for match in re.finditer(r"[FBIWfbiw]\d+", lines[at + 1 + rank]):
                    times[rank].append(begin + (match.start() - first) / (second - first) * (end - begin))

    assert times == {rank: [span.start for span in spans] for rank, spans in enumerate(timeline.spans)}


def test_lines_are_short_for_widely_different_times() -> None:
    timeline = simulate(FAMILIES["zb-v"].build(4, 8), forward=1e-6, weight_gradient=0.7)
    slow = simulate(FAMILIES["1f1b"].build(2, 2), transfer=1e6)

    assert max(map(len, _rows(_lines(timeline, 100), 4))) < 1000
    assert max(map(len, _rows(_lines(slow, 100), 2))) <= 20 * 8 * len("F0 ")


def test_actions_without_a_column_are_counted() -> None:
    lines = _lines(simulate(FAMILIES["zb-h1"].build(2, 4), weight_gradient=0), 80)
    assert "too short to draw: 8 W" in lines[1]
    assert not re.findall(r"W\d", "".join(_rows(lines, 2)))

    lines = _lines(simulate(FAMILIES["zb-h1"].build(2, 14), forward=0.1, input_gradient=5.0, weight_gradient=5.0), 80)
    assert "letter alone: no room for its number" in lines[1]
    assert re.findall(r"F+", "".join(_rows(lines, 2)))


def test_times_of_zero() -> None:
    assert "rank 1" in "\n".join(_lines(simulate(FAMILIES["1f1b"].build(2, 2), 0, 0, 0), 80))


@pytest.mark.parametrize(
    ("name", "chunks", "colours"), [("1f1b", 1, 2), ("zb-h1", 1, 3), ("interleaved", 4, 8), ("zb-v", 2, 6)]
)
def test_each_kind_and_chunk_has_its_own_colour(name: str, chunks: int, colours: int) -> None:
    text = draw(simulate(FAMILIES[name].build(4, 8, chunks)), 100, LEGEND)

    styles = {str(span.style) for span in text.spans if span.start > text.plain.index("rank 0")}

    assert len(styles - {"dim"}) == colours


def test_ranks_of_two_digits_stay_in_line() -> None:
    lines = _lines(simulate(FAMILIES["1f1b"].build(12, 2)), 60)

    assert lines[3].startswith("time     |0")
    assert lines[4].startswith("rank 0   F0")
    assert len({len(line) for line in lines[4:16]}) == 1


def test_an_exchange_is_drawn_as_far_as_nothing_hides_it() -> None:
    """A gather under a forward of 1, an average under a backward of 2."""
    additions = (*SHARDS_ONCE_A_STEP[:1], *AVERAGE)
    schedule = [add(actions, additions) for actions in FAMILIES["1f1b"].build(1, 2)]

    hidden, exposed = (_lines(simulate(schedule, exchange=time), 80) for time in (0.5, 4.0))

    assert hidden == _lines(simulate(FAMILIES["1f1b"].build(1, 2)), 80)
    assert exposed[0].startswith("F0 forward  B0 backward  G0 gather  A0 average  . bubble")
    (row,) = (line for line in exposed if line.startswith("rank 0"))
    assert row.rstrip() == "rank 0  F0 G0------ B0--- F1 B1--- A1---"
