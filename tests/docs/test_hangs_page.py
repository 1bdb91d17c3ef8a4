"""The lines that docs/guide/hangs.md shows are those of its program."""

import re
from pathlib import Path

from tests.docs.pages import GUIDE, blocks, fragments
from tests.docs.torchrun import run_forked

PAGE = GUIDE / "hangs.md"
SECONDS = re.compile(r"for \d+ s\b")


def test_the_program_hangs_and_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    (program,) = fragments(PAGE)
    (shown,) = [block.text for block in blocks(PAGE) if block.language == "text"]
    file = tmp_path / "empty" / "hang.py"
    file.parent.mkdir()
    file.write_text(program.text)
    ended = run_forked(file, 2)
    printed = ended.account
    assert ended.status == 1, printed
    lines = [SECONDS.sub("for N s", line.replace(f"{file.parent}/", "")) for line in printed.splitlines()]
    for line in SECONDS.sub("for N s", shown).splitlines():
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, one) for one in lines), f"no line as {line!r} in\n{printed}"
