"""Pictures of timelines: boxes, texts, sizes and colours."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.__main__ import main
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.axis import Axis, number
from nxdpp.schedules.view.blocks import LETTER
from nxdpp.schedules.view.labels import INK, NAMES, Labels, shade
from nxdpp.schedules.view.picture import svg
from nxdpp.schedules.view.svg_style import DARK, FONT, LIGHT

SVG = "{http://www.w3.org/2000/svg}"
AXIS = Axis("time", "time: a rank's forward takes 1")


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    tooltip: str | None
    colour: str | None


def _picture(timeline: Timeline, width: int = 960, title: str = "a schedule") -> Element:
    return ElementTree.fromstring(svg(title, {"": timeline}, AXIS, width))


def _texts(picture: Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def _boxes(picture: Element, kind: str) -> list[_Box]:
    """Return the boxes of a class."""
    found = []
    paths = [(path, group.get("fill")) for group in _groups(picture, kind) for path in group.findall(f"{SVG}path")]
    for path, colour in paths:
        found += [_Box(*sizes, path.findtext(f"{SVG}title"), colour) for sizes in _sizes(path)]
    return found


def _sizes(path: Element) -> list[tuple[float, float, float, float]]:
    """Return left, top, width and height of each rectangle of a path; one without width or height is a line."""
    edges = re.findall(r"M(\S+?) ([\d.]+)(?:v([\d.]+))?(?:h([\d.]+))?", path.attrib["d"])
    return [(float(left), float(top), float(width or 0), float(height or 0)) for left, top, height, width in edges]


def _of_class(picture: Element, kind: str, tag: str) -> list[Element]:
    return [element for group in _groups(picture, kind) for element in group.findall(f"{SVG}{tag}")]


def _groups(picture: Element, kind: str) -> list[Element]:
    return [group for group in picture.iter(f"{SVG}g") if group.get("class") == kind]


def _actions(picture: Element) -> list[_Box]:
    """Return the boxes of actions, without the boxes of the legend."""
    return [box for box in _boxes(picture, "action") if box.tooltip is not None]


def _labels(picture: Element) -> list[str]:
    return [text.text or "" for text in _of_class(picture, "label", "text")]


@pytest.mark.one_python
@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 8),
    microbatches=st.integers(1, 12),
    chunks=st.integers(1, 4),
    transfer=st.sampled_from([0.0, 0.1, 3.0]),
    width=st.integers(480, 1600),
)
@settings(deadline=None, max_examples=12)
def test_every_picture_shows_every_action_within_its_edges(
    name: str, ranks: int, microbatches: int, chunks: int, transfer: float, width: int
) -> None:
    family = FAMILIES[name]
    schedule = family.build(ranks, microbatches, chunks if family.any_chunks else None)
    timeline = simulate(schedule, transfer=transfer)
    labels = Labels(timeline.spans)

    picture = _picture(timeline, width)

    spans = [span for rank in timeline.spans for span in rank]
    drawn: dict[str, float] = {}
    parts = Counter(str(box.tooltip) for box in _actions(picture))
    for box in _actions(picture):
        assert box.tooltip is not None
        drawn[box.tooltip] = drawn.get(box.tooltip, 0.0) + box.width
    names = {f"{s.action}, {number(s.start)} to {number(s.end)}": s for s in spans}
    assert drawn.keys() == names.keys()
    longest = max(names, key=drawn.__getitem__)
    scale = drawn[longest] / (names[longest].end - names[longest].start)
    for tooltip, span in names.items():
        # Widths have one digit after the point, and so has the one that gives the scale.
        rounding = 0.05 * (parts[tooltip] + parts[longest]) + 1e-9
        assert drawn[tooltip] == pytest.approx((span.end - span.start) * scale, abs=rounding)
    # The first ones are in the legend.
    shown = _labels(picture)[len(labels.kinds) * len(labels.shown()) :]
    assert not Counter(shown) - Counter(labels.label(span.action) for span in spans)
    assert (len(shown) < len(spans)) == ("small boxes have no label" in _texts(picture))
    _check_edges(picture, width)


def _check_edges(picture: Element, width: int) -> None:
    assert picture.attrib["viewBox"] == f"0 0 {width} {picture.attrib['height']}"
    height = float(picture.attrib["height"])
    for kind in ("action", "row", "wait", "send"):
        for box in _boxes(picture, kind):
            assert min(box[:4]) >= 0
            assert box.x + box.width <= width
            assert box.y + box.height <= height
    centred = {id(text) for group in picture.iter(f"{SVG}g") if group.get("class") for text in group.iter(f"{SVG}text")}
    for text in picture.iter(f"{SVG}text"):
        x, y, w = float(text.attrib["x"]), float(text.attrib["y"]), len(text.text or "") * LETTER
        x -= w / 2 if id(text) in centred else w if text.get("text-anchor") == "end" else 0
        assert x >= 0
        assert x + w <= width
        assert FONT <= y <= height - 4


def test_letters_are_as_wide_as_the_style_says() -> None:
    """Menlo and DejaVu Sans Mono are the widest of the fonts: 0.602 of the height."""
    assert FONT >= 12
    assert LETTER >= 0.602 * FONT


def test_legend_axis_and_figures() -> None:
    timeline = simulate(FAMILIES["interleaved"].build(3, 4, 3), 1 / 3, 1 / 3, 1 / 3)
    picture = _picture(timeline, title="three <ranks> & $more$\x1b")

    texts = _texts(picture)
    assert {"three <ranks> & $more$?", "rank 0", "rank 1", "rank 2", "forward", "backward", "bubble"} <= set(texts)
    assert {"F0a", "F0b", "F0c", "F3c", "a to c: chunk of a rank", "time: a rank's forward takes 1"} <= set(texts)
    assert {"time", "0", "1", "2"} <= set(texts)
    figures = [(f"{100 * i:.1f} %", f"{p:.4g}") for i, p in zip(timeline.bubbles, timeline.peaks, strict=True)]
    assert all(set(pair) <= set(texts) for pair in figures)
    title, description = picture[0], picture[1]
    assert (title.tag, title.text) == (f"{SVG}title", "three <ranks> & $more$?")
    assert description.tag == f"{SVG}desc"
    assert "F forward, B backward" in str(description.text)
    assert picture.get("role") == "img"


def test_actions_are_above_the_ticks_of_their_times() -> None:
    picture = _picture(simulate(FAMILIES["1f1b"].build(2, 40)), 600)

    ticks = {
        (float(e.attrib["y"]), float(e.attrib["x"])): float(e.text or "")
        for group in _groups(picture, "axis")
        for e in group.iter(f"{SVG}text")
    }
    assert len({y for y, _ in ticks}) > 2
    starts: dict[str, _Box] = {}
    for box in _actions(picture):
        starts.setdefault(str(box.tooltip), box)
    for tooltip, box in starts.items():
        line = min(y for y, _ in ticks if y > box.y)
        at = [(x, time) for (y, x), time in sorted(ticks.items()) if y == line]
        (x, time), (x2, time2) = at[0], at[-1]
        found = time + (box.x - x) * (time2 - time) / (x2 - x)
        assert found == pytest.approx(float(tooltip.split()[1]), abs=0.01)


def test_several_timelines_have_one_scale_and_one_axis() -> None:
    schedule = FAMILIES["1f1b"].build(2, 3)
    slow, fast = simulate(schedule, 2.0), simulate(schedule, 1.0)
    picture = ElementTree.fromstring(svg("both", {"slow": slow, "fast": fast}, Axis("ms", "time: ms"), 960))

    texts = _texts(picture)
    assert texts.count("rank 1") == 2
    assert texts.count("ms") == 1
    assert texts.index("slow") < texts.index("fast") < texts.index("ms")
    forwards = [box for box in _actions(picture) if box.colour == shade(ActionKind.FORWARD, 0, 1)]
    assert len({(box.y, round(box.width, 1)) for box in forwards}) == 4
    widths = sorted(box.width for box in forwards)
    assert widths[-1] == pytest.approx(2 * widths[0], abs=0.05)
    _check_edges(picture, 960)


def test_waits_and_sends_are_marked_in_their_rows() -> None:
    timeline = simulate(FAMILIES["1f1b"].build(2, 60))
    end = timeline.makespan
    marks = {"wait": [[(0.0, end)], []], "send": [[], [(end, end), (1.0, 1.5)]]}
    text = svg("marked", {"a": timeline, "b": simulate(FAMILIES["1f1b"].build(2, 60), 0.1)}, AXIS, 700, {"a": marks})
    picture = ElementTree.fromstring(text)

    _check_edges(picture, 700)
    assert {"wait for another rank", "start of a send or receive"} <= set(_texts(picture))
    waits, sends = _boxes(picture, "wait"), _boxes(picture, "send")
    rows = {row.y: row.width for row in _boxes(picture, "row")}
    # The first ones are in the legend. A wait of the whole step is in the middle of each row of its rank.
    assert len(waits) == 1 + _texts(picture).count("time")
    assert all(wait.width == rows[wait.y - 9] for wait in waits[1:])
    assert len(sends) == 3


def test_actions_without_length_at_the_end_of_a_block() -> None:
    schedule = FAMILIES["zb-h1"].build(2, 60)
    short, long = simulate(schedule, 1, 1, 0), simulate(schedule, 1, 1, 1)
    for width in (480, 630):
        picture = ElementTree.fromstring(svg("both", {"long": long, "short": short}, AXIS, width))
        assert len({(box.tooltip, box.y) for box in _actions(picture)}) >= 2 * sum(map(len, schedule))


def test_a_long_schedule_has_blocks_of_equal_time() -> None:
    picture = _picture(simulate(FAMILIES["gpipe"].build(2, 60)), 480)

    texts = _texts(picture)
    rows = [round(row.width, 1) for row in _boxes(picture, "row")]
    assert texts.count("rank 0") == texts.count("time") > 20
    # The first one is in the legend.
    assert len(set(rows[1:-2])) == 1
    assert rows[-1] > rows[1] / 4
    assert "small boxes have no label" not in texts


def test_times_of_zero() -> None:
    _check_edges(_picture(simulate(FAMILIES["gpipe"].build(2, 2), 0, 0, 0)), 960)


def test_the_style_follows_the_reader() -> None:
    style = _picture(simulate(FAMILIES["1f1b"].build(2, 2))).findtext(f"{SVG}style")

    light, dark = str(style).split("@media (prefers-color-scheme: dark)")
    assert all(colour in light for colour in LIGHT.values())
    assert all(colour in dark for colour in DARK.values())


def test_a_label_does_not_hide_the_tooltip_of_its_action() -> None:
    style = _picture(simulate(FAMILIES["1f1b"].build(2, 2))).findtext(f"{SVG}style")

    assert "pointer-events: none" in str(style).rpartition(".label text {")[2]


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        assert main([*command, "--svg", str(tmp_path / "a.svg")]) == 2

    assert capsys.readouterr().err == (
        "nxdpp schedule: --svg draws with matplotlib, which is not installed: pip install 'nxdpp[pictures]'.\n"
    )


# Colours.

# Matrices of Machado, Oliveira and Fernandes (2009) for readers without one kind of cones, in linear RGB.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red cones": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green cones": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue cones": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def _linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def _contrast(first: str, second: str) -> float:
    """Return the contrast of WCAG 2."""
    lights = [sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), _linear(c), strict=True)) for c in (first, second)]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def _lab(colour: str, sight: str) -> list[float]:
    """Return the place of a colour in CIE L*a*b*, as a reader sees it."""
    seen = [min(1.0, max(0.0, sum(m * v for m, v in zip(row, _linear(colour), strict=True)))) for row in SIGHTS[sight]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * v for m, v in zip(row, seen, strict=True)) / sum(row) for row in to_xyz]
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def _distance(sight: str) -> Callable[[str, str], float]:
    def between(first: str, second: str) -> float:
        pairs = zip(_lab(first, sight), _lab(second, sight), strict=True)
        return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)

    return between


def test_letters_have_contrast() -> None:
    for kind in NAMES:
        for chunk in range(8):
            assert _contrast(INK, shade(kind, chunk, 8)) >= 4.5
    for colours in (LIGHT, DARK):
        assert _contrast(colours["text"], colours["page"]) >= 4.5
        # Boxes and lines beside the row's background; 3 is WCAG's for graphics.
        assert _contrast(colours["line"], colours["page"]) >= 3


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_kinds_and_chunks_are_apart_for_every_eye(sight: str, chunks: int) -> None:
    distance = _distance(sight)
    for chunk in range(chunks):
        for first, second in combinations([shade(kind, chunk, chunks) for kind in NAMES], 2):
            assert distance(first, second) >= 12
    for kind in NAMES:
        for first, second in combinations([shade(kind, chunk, chunks) for chunk in range(chunks)], 2):
            assert distance(first, second) >= 8
        assert all(distance(shade(kind, c, chunks), DARK["row"]) >= 20 for c in range(chunks))


def test_shades_get_stronger_with_the_chunk() -> None:
    lights = [_lab(shade(ActionKind.FORWARD, chunk, 4), "all cones")[0] for chunk in range(4)]

    assert lights == sorted(lights, reverse=True)
    assert re.fullmatch("#[0-9a-f]{6}", shade(ActionKind.FORWARD, 0, 1))
