"""Tables "theirs | ours | note" of the pages for those who come from another library: all names of ours exist."""

import inspect
import re
from pathlib import Path

import pytest

from nxdpp.schedules.families.registry import FAMILIES
from tests.docs.pages import GUIDE
from tests.support.dotted_names import imported

pytestmark = pytest.mark.one_python

PAGES = [pytest.param(page, id=page.stem) for page in sorted(GUIDE.glob("from_*.md"))]


def _rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert lines[0] == "| theirs | ours | note |"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_there_are_four_pages() -> None:
    assert [page.id for page in PAGES] == ["from_accelerate", "from_deepspeed", "from_nxd", "from_torch_pipelining"]


@pytest.mark.parametrize("page", PAGES)
def test_names_and_arguments_of_ours_exist(page: Path) -> None:
    rows = _rows(page)
    assert len(rows) >= 14
    for theirs, ours, note in rows:
        assert theirs
        assert ours or note, theirs
        for cell in filter(None, ours.split(", ")):
            name = re.fullmatch(r"`([\w.]+?)(?:\((\w+)=\))?`", cell)
            assert name, cell
            found = imported(name[1])
            if name[2]:
                assert callable(found)
                assert name[2] in inspect.signature(found).parameters, cell


@pytest.mark.parametrize("page", PAGES)
def test_schedules_in_the_notes_exist(page: Path) -> None:
    for _, ours, note in _rows(page):
        if ours == "`NxDPPModel(schedule=)`":
            assert set(re.findall(r'`"([\w-]+)"`', note)) <= set(FAMILIES), note
