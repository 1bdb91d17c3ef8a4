"""Restarts by torchrun: each start is clean after each fault of the start before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
