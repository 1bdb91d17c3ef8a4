"""Scripts as their reader runs them, in the folder of the script.

``run`` has torchrun start an interpreter a rank, which has imported nothing. That takes three interpreters' imports of
torch and transformers, most of the time of a page. ``run_forked`` runs most pages in forks with a seed each: a script
without a seed has other weights on each rank in both. ``python -m pytest -m sweep tests/docs`` has torchrun run all.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import ROOT
from tests.support.run_program import run_program

SCRIPT_SECONDS = 400.0
"""Time that torchrun and its ranks have. A page needs 5 to 15 s on two quiet cores."""

END_SECONDS = 40.0
"""Time in which torchrun ends its ranks: it kills them 30 s after it has asked them to."""


class Ended(NamedTuple):
    """Exit status of torchrun, the standard output of each rank, and all that ranks and torchrun wrote."""

    status: int
    outputs: list[str]
    account: str


def run_forked(script: Path, ranks: int, seconds: float = SCRIPT_SECONDS) -> Ended:
    """Run ``script`` in its folder on ``ranks`` forks of a process that has imported torch and transformers."""
    ended = run_program(str(script), [], ranks, seconds, folder=script.parent, as_torchrun=True)
    return Ended(max(code or 0 for code in ended.codes), ended.outputs, ended.output)


def run(script: Path, ranks: int, seconds: float = SCRIPT_SECONDS) -> Ended:
    """Run ``script`` in its folder under ``torchrun --standalone --nproc-per-node RANKS``.

    The logs lie beside that folder, which has only what the script writes. Raises ``AssertionError`` with the account
    after ``seconds``; the ranks have ended then.
    """
    logs = script.parent.parent / f"logs of {script.parent.name}"
    logs.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(logs), "--redirects", "3", script.name]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (logs / "torchrun.log").open("w") as written:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=script.parent,
            env={**os.environ, "PYTHONPATH": path},
            stdout=written,
            stderr=written,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise AssertionError(f"no end after {seconds} s\n{_account(logs)}") from error
        finally:
            _end(process)
    return Ended(status, [_printed(logs, rank) for rank in range(ranks)], _account(logs))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _printed(logs: Path, rank: int) -> str:
    lines = (file.read_text().splitlines(keepends=True) for file in logs.glob(f"*/attempt_0/{rank}/stdout.log"))
    # torch 2.9 prints lines of gloo.
    return "".join(line for each in lines for line in each if not line.startswith("[Gloo]"))


def _account(logs: Path) -> str:
    files = [*sorted(logs.glob("*/attempt_0/*/std*.log")), logs / "torchrun.log"]
    return "".join(f"---- {file.parent.name} {file.name}:\n{text}" for file in files if (text := file.read_text()))
