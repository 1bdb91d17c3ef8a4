"""The lines that docs/guide/hangs.md shows are those of its program."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, blocks, fragments
from tests.support.run_program import run_program

pytestmark = pytest.mark.one_python

PAGE = GUIDE / "hangs.md"
SECONDS = re.compile(r"for \d+ s\b")


def test_the_program_hangs_and_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    (program,) = fragments(PAGE)
    (shown,) = [block.text for block in blocks(PAGE) if block.language == "text"]
    (tmp_path / "hang.py").write_text(program.text)
    ended = run_program(str(tmp_path / "hang.py"), [], 2, first_rank_has_store=True, own_outputs=True)
    printed = ended.output
    assert ended.codes == [1, 1], printed
    lines = [SECONDS.sub("for N s", line.replace(f"{tmp_path}/", "")) for line in printed.splitlines()]
    for line in SECONDS.sub("for N s", shown).splitlines():
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, one) for one in lines), f"no line as {line!r} in\n{printed}"
