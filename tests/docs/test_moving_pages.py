"""Tables "theirs | ours | note" of the pages for those who come from another library: the names exist."""

import inspect
import re
from pathlib import Path

import accelerate
import pytest
import torch.distributed.pipelining as pipelining

from tests.docs.pages import GUIDE
from tests.support.dotted_names import imported

PAGES = [pytest.param(page, id=page.stem) for page in sorted(GUIDE.glob("from_*.md"))]


def _rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert lines[0] == "| theirs | ours | note |"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def _theirs(page: str) -> str:
    """The code of the first column of a page, one piece a line."""
    return "\n".join(code for theirs, *_ in _rows(GUIDE / page) for code in re.findall(r"`([^`]+)`", theirs))


@pytest.mark.parametrize("page", PAGES)
def test_names_and_arguments_of_ours_exist(page: Path) -> None:
    rows = _rows(page)
    assert len(rows) >= 14
    assert len({theirs for theirs, *_ in rows}) == len(rows)
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


def test_names_of_accelerate_exist() -> None:
    text = _theirs("from_accelerate.md")
    methods = re.findall(r"accelerator\.(\w+)", text)
    assert len(methods) >= 12
    for name in methods:
        assert hasattr(accelerate.Accelerator, name), name
    for name in re.findall(r"^(\w+)\(", text, re.MULTILINE):
        owners = accelerate, accelerate.utils, accelerate.Accelerator
        assert any(hasattr(owner, name) for owner in owners), name


def test_names_of_torch_pipelining_exist() -> None:
    names = re.findall(r"\b(Schedule\w+|SplitPoint|PipelineStage|pipeline)\b", _theirs("from_torch_pipelining.md"))
    assert len(names) >= 9
    for name in names:
        assert hasattr(pipelining, name), name
