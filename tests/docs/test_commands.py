"""Commands of the pages are ones that exist: their programs, files and flags."""

import dataclasses
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from transformers import TrainingArguments

from nxdpp.__main__ import _parser
from tests.docs.pages import ROOT, commands, guide_pages

# Python prints the flags of a parser that refuses arguments, and ends.
_OPTIONS_OF_PYTHON = re.compile(r"-[OuBEsI]+|-X\S+|-W\S+")


def check_command(words: list[str]) -> None:
    """Raise ``ValueError`` or ``SystemExit`` for a program, file or flag that does not exist."""
    for place, word in enumerate(words):
        if word == "torchrun":
            started = get_args_parser().parse_args(words[place + 1 :])
            if started.module:
                check_module(started.training_script, started.training_script_args)
            else:
                check_script(started.training_script, started.training_script_args)
            return
        if re.fullmatch(r"python[\d.]*", os.path.basename(word)):
            rest = words[place + 1 :]
            while rest and _OPTIONS_OF_PYTHON.fullmatch(rest[0]):
                rest = rest[1:]
            if rest and rest[0] == "-m":
                check_module(rest[1], rest[2:])
            elif rest and not rest[0].startswith("-"):
                check_script(rest[0], rest[1:])
            return


def check_module(name: str, arguments: list[str]) -> None:
    if name == "nxdpp":
        _parser().parse_args(arguments)
    elif name == "torch.distributed.run":
        check_command(["torchrun", *arguments])
    elif name.split(".")[0] in ("nxdpp", "benchmarks", "tests"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise ValueError(f"no module {name}")
        check_flags(Path(found.origin), arguments)


def check_script(path: str, arguments: list[str]) -> None:
    """A path without a folder is a script of the reader's own."""
    if "/" in path and not path.startswith(("/", "$", "~")):
        if not (ROOT / path).is_file():
            raise ValueError(f"no file {path}")
        check_flags(ROOT / path, arguments)


def check_flags(file: Path, arguments: list[str]) -> None:
    """Raise ``ValueError`` for a flag that no source file beside ``file`` names."""
    source = "".join(path.read_text(encoding="utf-8") for path in file.parent.glob("*.py"))
    # transformers' parser makes a flag of each field of a dataclass.
    fields = set(re.findall(r"^    (\w+): ", source, re.MULTILINE)) if "HfArgumentParser" in source else set()
    if fields:
        fields |= {field.name for field in dataclasses.fields(TrainingArguments)}
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and f'"{flag}"' not in source and flag.removeprefix("--") not in fields:
            raise ValueError(f"{file.relative_to(ROOT)} has no flag {flag}")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in [*guide_pages(), ROOT / "README.md"]])
def test_commands_of_a_page_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, command in commands(page):
        for part in re.split(r"&&|\|\||[;|]", command):
            try:
                check_command(shlex.split(part, comments=True))
            except (ValueError, SystemExit) as error:
                reason = capsys.readouterr().err.strip() or str(error)
                raise AssertionError(f"{page.relative_to(ROOT)}:{line}: {part.strip()}: {reason}") from error


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 examples/llama/train.py --no-such-flag",
        "torchrun --nproc-per-node 2 examples/llama/no_such_file.py",
        "OMP_NUM_THREADS=1 python -m nxdpp schedule 1f1b --no-such-flag",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit)):
        check_command(shlex.split(command))
