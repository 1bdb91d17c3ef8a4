"""Each start is clean: by torchrun after a fault, and in one process after ``destroy_model_parallel``."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_program import run_program

pytestmark = pytest.mark.one_python

PROGRAM = str(Path(__file__).with_name("restarted_program.py"))
# The rank of the fault takes turns. SIGKILL is a case of tests/hosts, and os._exit looks like SIGKILL to the others.
FAULTS = ["exception", "SIGTERM", "early_exception"]
MORE = ["exception", "SIGSEGV", "early_exception", "SIGTERM", "exit"]


@pytest.mark.parametrize("faults", [FAULTS, pytest.param(MORE, marks=pytest.mark.sweep)], ids=len)
def test_torchrun_restarts_after_each_fault(faults: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", str(len(faults))]
    ended = subprocess.run(
        [*command, PROGRAM, str(tmp_path), *faults],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout
    happened = re.findall(r"start (\d): rank (\d) has (\w+)", ended.stdout)
    after_the_start = [
        (str(start), str(start % 2), fault) for start, fault in enumerate(faults) if not fault.startswith("early_")
    ]
    assert happened == after_the_start, ended.stdout
    well = re.findall(r"start (\d): rank (\d) ends well", ended.stdout)
    assert sorted(well) == [(str(len(faults)), "0"), (str(len(faults)), "1")], ended.stdout


@pytest.mark.parametrize("cycles", [10, pytest.param(200, marks=pytest.mark.sweep)])
def test_cycles_of_initialise_and_destroy_leave_nothing_behind(cycles: int, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("cycled_program.py"))
    ended = run_program(program, [str(cycles), str(tmp_path)], 2)
    assert ended.codes == [0, 0], ended.output
    left = dict(re.findall(r"rank (\d), \d+ cycles, left behind: (.*)", ended.output))
    assert len(left) == 2, ended.output
    for text in left.values():
        kept = ast.literal_eval(text)
        # The heap varies by some MiB.
        assert kept.pop("MiB", 0) <= 8, ended.output
        assert not kept, ended.output
