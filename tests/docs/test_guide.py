"""The code of the pages in docs/guide runs over ranks, and prints the text that the pages show.

All blocks of a page, in order, are one script. ``python -m pytest tests/docs -k first_pipeline`` runs one page.
"""

import contextlib
import io
import os
import runpy
import sys
import traceback
from pathlib import Path

import pytest

from tests.docs.logger_modules import logger_modules
from tests.docs.pages import ROOT, fragments, guide_pages, number_of_ranks, printed_text, script
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

LONGEST = 119
"""Lines of a page at most."""

PAGES = [pytest.param(page, id=page.stem) for page in guide_pages()]
WITH_CODE = [pytest.param(page, id=page.stem) for page in guide_pages() if script(page)]


class _Copied(io.StringIO):
    """Text that goes to the process's output too."""

    def write(self, text: str) -> int:
        assert sys.__stdout__ is not None
        sys.__stdout__.write(text)
        return super().write(text)


def run_page(rank: int, page: Path, folder: Path) -> str:
    """Run the script of ``page`` in ``folder`` as a program; return what this rank prints."""
    os.chdir(folder)
    if page.stem == "logging":
        sys.modules |= logger_modules()
    file = str(folder / "train.py")
    sys.argv = [file]
    printed = _Copied()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(file, run_name="__main__")
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f"{os.path.relpath(page, ROOT)}:{lines[-1] if lines else getattr(error, 'lineno', 1)}"
        raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_its_text(page: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(page), encoding="utf-8")
    printed = run_ranks(number_of_ranks(page), run_page, page, tmp_path)
    for rank, text in printed_text(page).items():
        assert _lines(printed[rank]) == _lines(text), f"{page.relative_to(ROOT)}: rank {rank} prints\n{printed[rank]}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_its_fragments_compile(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("# ")
    for block in fragments(page):
        compile("\n" * (block.line - 1) + block.text, str(page), "exec")
