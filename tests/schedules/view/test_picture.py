"""Pictures of timelines, and the colours of actions."""

import re
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from nxdpp.__main__ import main
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.labels import INK, NAMES, Labels, shade
from nxdpp.schedules.view.picture import write_picture

SVG = "{http://www.w3.org/2000/svg}"


def _picture(timeline: Timeline, folder: Path, title: str = "a schedule") -> tuple[list[str], list[str]]:
    """Return the texts of the picture and the colours of its boxes, in their order."""
    write_picture(title, timeline, "time: a rank's forward takes 1", folder / "a.svg")
    picture = ElementTree.parse(folder / "a.svg").getroot()
    styles = [path.get("style", "") for path in picture.iter(f"{SVG}path") if path.get("clip-path")]
    return [text.text or "" for text in picture.iter(f"{SVG}text")], [style[6:13] for style in styles]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_action_has_a_box_and_a_label(name: str, tmp_path: Path) -> None:
    timeline = simulate(FAMILIES[name].build(4, 6))
    labels = Labels(timeline.spans)
    texts, colours = _picture(timeline, tmp_path)
    for spans in timeline.spans:
        for action in (span.action for span in spans):
            assert labels.label(action) in texts
            assert shade(action.kind, labels.chunk(action), labels.chunks) in colours
    # A box at the end of a block goes on in the next one.
    actions, blocks = sum(map(len, timeline.spans)), texts.count("rank 0")
    assert actions <= len(colours) <= actions + 4 * (blocks - 1)


def test_texts_of_a_picture(tmp_path: Path) -> None:
    timeline = simulate(FAMILIES["interleaved"].build(3, 4, 3), 1 / 3, 1 / 3, 1 / 3)
    texts, _ = _picture(timeline, tmp_path, "three <ranks> & $more$\x1b")
    assert {"three <ranks> & $more$?", "rank 0", "rank 2", "F0a forward", "F0c forward", "B0b backward"} <= set(texts)
    assert {"time: a rank's forward takes 1; a to c: chunk of a rank", "0", "2"} <= set(texts)
    figures = [f"{100 * i:5.1f} % {p:6.4g}" for i, p in zip(timeline.bubbles, timeline.peaks, strict=True)]
    assert set(figures) <= set(texts)


@pytest.mark.parametrize(("microbatches", "transfer", "least", "most"), [(2, 0, 1, 1), (60, 0, 5, 9), (4, 1e6, 1, 16)])
def test_a_long_schedule_has_blocks(microbatches: int, transfer: float, least: int, most: int, tmp_path: Path) -> None:
    texts, _ = _picture(simulate(FAMILIES["gpipe"].build(2, microbatches), transfer=transfer), tmp_path)
    assert least <= texts.count("rank 0") == texts.count("rank 1") <= most


def test_times_of_zero(tmp_path: Path) -> None:
    texts, _ = _picture(simulate(FAMILIES["gpipe"].build(2, 2), 0, 0, 0), tmp_path)
    assert "makespan 0, bubble 0.0 % on average" in texts


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


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_kinds_and_chunks_are_apart_for_every_eye(sight: str, chunks: int) -> None:
    distance = _distance(sight)
    # All exchanges have one colour; their letters differ.
    kinds = list({shade(kind, 0, 1): kind for kind in NAMES}.values())
    assert len(kinds) == 5
    for chunk in range(chunks):
        for first, second in combinations([shade(kind, chunk, chunks) for kind in kinds], 2):
            assert distance(first, second) >= 12
    for kind in kinds:
        for first, second in combinations([shade(kind, chunk, chunks) for chunk in range(chunks)], 2):
            assert distance(first, second) >= 8


def test_shades_get_stronger_with_the_chunk() -> None:
    lights = [_lab(shade(ActionKind.FORWARD, chunk, 4), "all cones")[0] for chunk in range(4)]

    assert lights == sorted(lights, reverse=True)
    assert re.fullmatch("#[0-9a-f]{6}", shade(ActionKind.FORWARD, 0, 1))
