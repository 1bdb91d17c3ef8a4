"""Pictures of timelines, and the colours of actions."""

import sys
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from nxdpp.__main__ import main
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.labels import Labels, shade
from nxdpp.schedules.view.picture import write_picture

SVG = "{http://www.w3.org/2000/svg}"


def _picture(timeline: Timeline, folder: Path, title: str = "a schedule") -> tuple[list[str], list[str]]:
    """Return the texts of the picture and the colours of its boxes, in their order."""
    write_picture(title, timeline, "time: a rank's forward takes 1", folder / "a.svg")
    picture = ElementTree.parse(folder / "a.svg").getroot()
    styles = [
        path.get("style", "") for path in picture.iter(f"{SVG}path") if "stroke: #ffffff" in path.get("style", "")
    ]
    return [text.text or "" for text in picture.iter(f"{SVG}text")], [style[6:13] for style in styles]


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
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


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        assert main([*command, "--svg", str(tmp_path / "a.svg")]) == 2

    assert capsys.readouterr().err == (
        "nxdpp schedule: --svg draws with matplotlib, which is not installed: pip install 'nxdpp[pictures]'.\n"
    )
