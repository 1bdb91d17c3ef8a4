"""The pictures and the drawing of docs/schedules.md are those of the commands on the page."""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nxdpp.__main__ import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
PICTURES = ROOT / "docs" / "pictures"
COMMANDS = re.findall(r"^python -m nxdpp (.*) --svg docs/pictures/(\S+)$", PAGE, re.MULTILINE)


def test_each_picture_has_a_command() -> None:
    assert {name for _, name in COMMANDS} == {path.name for path in PICTURES.glob("*.svg")}


@pytest.mark.parametrize(("command", "name"), COMMANDS, ids=lambda each: each if each.endswith(".svg") else "")
def test_a_picture_is_that_of_its_command(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    assert main([*shlex.split(command), "--svg", str(tmp_path / name)]) == 0

    made, shown = ((folder / name).read_text() for folder in (tmp_path, PICTURES))
    # Other versions of matplotlib write other elements around the same texts.
    assert _content(made) == _content(shown), f"make it again: python -m nxdpp {command} --svg docs/pictures/{name}"


def _content(picture: str) -> list[str]:
    return [text for text in map(str.strip, ElementTree.fromstring(picture).itertext()) if text]


DRAWINGS = re.findall(r"`python -m nxdpp ([^`]*)` prints[^\n]*\n```\n(.*?)\n```", PAGE, re.DOTALL)


def test_the_drawing_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ((command, drawing),) = DRAWINGS

    assert main([*command.split(), "--width", "80"]) == 0

    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.startswith(drawing)
