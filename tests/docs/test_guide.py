"""The code of the pages in docs/guide runs, and prints the text that the pages show.

All blocks of a page, in order, are one script. ``python -m pytest tests/docs -k first_pipeline`` runs one page.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, fragments, guide_pages, number_of_ranks, printed_text, script
from tests.docs.torchrun import Ended, run, run_forked

LONGEST = 119
"""Lines of a page at most."""

PAGES = [pytest.param(page, id=page.stem) for page in guide_pages()]
WITH_CODE = [pytest.param(page, id=page.stem) for page in guide_pages() if script(page)]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def run_page(page: Path, folder: Path, start: Callable[[Path, int], Ended]) -> Ended:
    """Run the script of ``page`` in an otherwise empty folder; traces have the file and the lines of ``page``."""
    (folder / "empty").mkdir()
    file = folder / "empty" / "train.py"
    file.write_text(script(page), encoding="utf-8")
    ended = start(file, number_of_ranks(page))
    return ended._replace(account=ended.account.replace(str(file), os.path.relpath(page, ROOT)))


@pytest.mark.parametrize("start", [run_forked, pytest.param(run, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_its_text(
    page: Path, start: Callable[[Path, int], Ended], tmp_path: Path
) -> None:
    ended = run_page(page, tmp_path, start)
    assert ended.status == 0, ended.account
    for rank, text in printed_text(page).items():
        printed = ended.outputs[rank]
        assert _lines(printed) == _lines(text), f"{page.relative_to(ROOT)}: rank {rank} prints\n{printed}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_its_fragments_compile(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("# ")
    for block in fragments(page):
        compile("\n" * (block.line - 1) + block.text, str(page), "exec")
