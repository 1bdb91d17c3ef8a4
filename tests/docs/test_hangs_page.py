"""The lines that docs/guide/hangs.md shows are those of its program."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, ROOT, blocks, fragments

pytestmark = pytest.mark.one_python

PAGE = GUIDE / "hangs.md"
SECONDS = re.compile(r"for \d+ s\b")


def test_the_program_hangs_and_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    (program,) = fragments(PAGE)
    (shown,) = [block.text for block in blocks(PAGE) if block.language == "text"]
    (tmp_path / "hang.py").write_text(program.text)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = str(chosen.getsockname()[1])
    common = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "hang.py"],
            cwd=tmp_path,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = "".join(rank.communicate(timeout=100)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1], printed
    lines = [SECONDS.sub("for N s", line.replace(f"{tmp_path}/", "")) for line in printed.splitlines()]
    for line in SECONDS.sub("for N s", shown).splitlines():
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, one) for one in lines), f"no line as {line!r} in\n{printed}"
