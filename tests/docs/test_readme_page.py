"""README.md is short and has what a new user needs first; the flags of the main job's page exist."""

import importlib.util
import re
import shlex
import sys

import pytest

from tests.docs.pages import GUIDE, ROOT, blocks

pytestmark = pytest.mark.one_python

README = ROOT / "README.md"
TEXT = README.read_text()


def test_it_is_short_and_begins_with_three_sentences_and_a_picture() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 120
    _, first, picture, *_ = TEXT.split("\n\n")
    assert len(re.findall(r"\.(?:\s|$)", first)) == 3
    assert re.fullmatch(r"!\[.+\]\(docs/pictures/[\w-]+\.svg\)", picture)
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


def test_the_two_commands_and_the_line_for_the_cpu() -> None:
    """``.ci/run`` runs the two commands as they are written here."""
    commands = [block.text for block in blocks(README) if block.language == "sh"]
    assert [bool(re.search(r"^pip install .* && .*(train\.py|pytest)$", command)) for command in commands] == [
        *(False, True, True)
    ]
    cpu, main_job, _ = commands
    assert cpu.split()[-1] == "https://download.pytorch.org/whl/cpu"
    assert " OMP_NUM_THREADS=1 torchrun " in main_job  # else torchrun prints two lines about it
    assert "5 GB" in TEXT
    assert TEXT.index("5 GB") < TEXT.index(cpu) < TEXT.index(main_job)


def test_the_changed_loop_has_what_a_training_needs() -> None:
    (change,) = [block.text for block in blocks(README) if block.language == "diff"]
    for needed in ("clip_grad_norm_", "scheduler.step()", "print("):
        assert needed in change


def test_the_flags_of_the_main_job_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples/llama"
    monkeypatch.syspath_prepend(str(folder))
    specification = importlib.util.spec_from_file_location("flags_of_the_main_job", folder / "flags.py")
    assert specification is not None
    assert specification.loader is not None
    flags = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "flags_of_the_main_job", flags)
    specification.loader.exec_module(flags)
    given = re.findall(r"^\| `(--[^`]+)` \|", (GUIDE / "main_job.md").read_text(), re.M)
    assert len(given) >= 10
    for line in given:
        flags.make_parser().parse_args(shlex.split(line))
