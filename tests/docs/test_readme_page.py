"""README.md is short, has what a new user needs first, and its code runs; the flags of the main job's page exist."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, ROOT, blocks
from tests.docs.torchrun import run_forked

README = ROOT / "README.md"
TEXT = README.read_text()


def test_it_is_short_and_its_first_screen_has_the_state() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 60
    _, first, picture, *_ = TEXT.split("\n\n")
    assert len(re.findall(r"\.(?:\s|$)", first)) == 3
    assert re.fullmatch(r"!\[.+\]\(docs/pictures/[\w-]+\.svg\)", picture)
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
    assert sum(line.startswith("| [") for line in lines) <= 10
    screen = "\n".join(lines[:25])
    assert all(word in screen for word in ("CPU", "GPU", "tests", "When not to use it"))


def test_its_figures_are_those_of_the_comparison() -> None:
    """1F1B's times above the ideal in the table of efficiency, of torch's: the smallest and the largest cell."""
    table = (ROOT / "benchmarks/results/compare.md").read_text().partition("<!-- efficiency -->")[2]
    (row,) = re.findall(r"^\| 1f1b +\|(.*)$", table.partition("<!-- end of efficiency -->")[0], re.MULTILINE)
    ratios = re.findall(r"\((\d\.\d+)\)", row)
    assert len(ratios) == 4
    assert f"1F1B's time above the ideal is {min(ratios)} to {max(ratios)} of torch's" in TEXT


def lines_of(change: str, left_out: str) -> str:
    return "\n".join(line[1:] for line in change.splitlines() if not line.startswith(left_out))


def losses(program: str, ranks: int, folder: Path) -> list[list[str]]:
    """The lines that each rank of ``program`` prints."""
    folder.mkdir()
    file = folder / "train.py"
    file.write_text(program)
    ended = run_forked(file, ranks)
    assert ended.status == 0, ended.account
    return [output.splitlines() for output in ended.outputs]


def test_the_change_runs_as_pasted_and_prints_the_same_losses(tmp_path: Path) -> None:
    (change,) = [block.text for block in blocks(README) if block.language == "diff"]
    before, after = lines_of(change, "+"), lines_of(change, "-")
    assert "nxdpp" not in before
    (expected,) = losses(before, 1, tmp_path / "before")
    assert len(expected) == 10
    assert losses(after, 4, tmp_path / "after") == [expected] * 4


def test_the_flags_of_the_main_job_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/llama"))
    from train import read_flags

    given = re.findall(r"^\| `(--[^`]+)` \|", (GUIDE / "main_job.md").read_text(), re.M)
    assert len(given) >= 10
    for line in given:
        monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(line)])
        read_flags()
