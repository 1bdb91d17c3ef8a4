"""Drawings in a terminal of any width, with and without colour."""

import io
import re

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


@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 16),
    microbatches=st.integers(1, 20),
    chunks=st.integers(1, 4),
    transfer=st.sampled_from([0.0, 0.0, 0.1, 0.7]),
    width=st.integers(40, 200),
)
@settings(deadline=None, max_examples=30)
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
@settings(deadline=None, max_examples=30)
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


def test_an_exchange_is_drawn_as_far_as_nothing_hides_it() -> None:
    """A gather under a forward of 1, an average under a backward of 2."""
    additions = (*SHARDS_ONCE_A_STEP[:1], *AVERAGE)
    schedule = [add(actions, additions) for actions in FAMILIES["1f1b"].build(1, 2)]

    hidden, exposed = (_lines(simulate(schedule, exchange=time), 80) for time in (0.5, 4.0))

    assert hidden == _lines(simulate(FAMILIES["1f1b"].build(1, 2)), 80)
    assert exposed[0].startswith("F0 forward  B0 backward  G0 gather  A0 average  . bubble")
    (row,) = (line for line in exposed if line.startswith("rank 0"))
    assert row.rstrip() == "rank 0  F0 G0------ B0--- F1 B1--- A1---"
