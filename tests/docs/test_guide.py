"""The code of the pages in docs/guide runs under torchrun, and prints the text that the pages show.

All blocks of a page, in order, are one script. ``python -m pytest tests/docs -k first_pipeline`` runs one page.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, ROOT, fragments, guide_pages, number_of_ranks, printed_text, script
from tests.docs.torchrun import Torchrun

pytestmark = pytest.mark.one_python

LONGEST = 119
"""Lines of a page at most."""

PAGES = [pytest.param(page, id=page.stem) for page in guide_pages()]
WITH_CODE = [pytest.param(page, id=page.stem) for page in guide_pages() if script(page)]


def _lines(text: str) -> list[str]:
    # torch 2.9 prints lines of gloo.
    return [line.rstrip() for line in text.strip().splitlines() if not line.startswith("[Gloo]")]


def outcome(page: Path, folder: Path) -> str:
    """Text that the ranks have written, with the file and the lines of ``page`` in their traces."""
    written = "".join(f"---- {file.name}:\n{file.read_text()}" for file in sorted(folder.glob("*.txt")))
    return written.replace(str(folder / "empty" / "train.py"), os.path.relpath(page, ROOT))


def write_script(page: Path, folder: Path) -> Path:
    """Write the script of ``page`` into an otherwise empty folder."""
    (folder / "empty").mkdir()
    file = folder / "empty" / "train.py"
    file.write_text(script(page), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Callable[[int], Torchrun]]:
    """A torchrun for each number of ranks, which starts when a page needs it."""
    with ExitStack() as stack:
        yield cache(lambda ranks: stack.enter_context(Torchrun(ranks)))


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_its_text(
    page: Path, torchrun: Callable[[int], Torchrun], tmp_path: Path
) -> None:
    ranks = number_of_ranks(page)
    codes = torchrun(ranks).run(page.stem, write_script(page, tmp_path), tmp_path)
    assert codes == [0] * ranks, outcome(page, tmp_path)
    for rank, text in printed_text(page).items():
        printed = (tmp_path / f"out{rank}.txt").read_text()
        assert _lines(printed) == _lines(text), f"{page.relative_to(ROOT)}: rank {rank} prints\n{printed}"


@pytest.mark.parametrize("name", ["first_pipeline", pytest.param("fine_tuning", marks=pytest.mark.sweep)])
def test_a_page_runs_as_its_reader_starts_it(name: str, tmp_path: Path) -> None:
    """In processes that have imported nothing before."""
    page = GUIDE / f"{name}.md"
    file = write_script(page, tmp_path)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number_of_ranks(page)), file.name]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "torchrun.txt").open("w") as written:
        run = subprocess.run(
            [sys.executable, *command],
            cwd=file.parent,
            env={**os.environ, "PYTHONPATH": path},
            stdout=written,
            stderr=written,
            timeout=200,
        )
    assert run.returncode == 0, outcome(page, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_its_fragments_compile(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("# ")
    for block in fragments(page):
        compile("\n" * (block.line - 1) + block.text, str(page), "exec")
