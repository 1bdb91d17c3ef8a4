"""The Slurm scripts of docs/guide/several_hosts.md, run with programs in the place of Slurm's and of the training."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, ROOT, blocks

_SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' $3 $3
"""

# Starts its command as often as the script's header asks, with the variables that srun gives.
_SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=$((NODES * TASKS)) SLURM_STEP_TASKS_PER_NODE="$TASKS(x$NODES)"
for node in $(seq 0 $((NODES - 1))); do
    for task in $(seq 0 $((TASKS - 1))); do
        SLURM_NODEID=$node SLURM_LOCALID=$task SLURM_PROCID=$((node * TASKS + task)) "$@" &
    done
done
wait
"""

# Prints in one write: the lines of processes do not mix.
TRAIN = """import os, sys
sys.path.insert(0, os.environ["LAUNCHER"])
from launcher import launcher
it = launcher()
os.write(1, f"{it.name} {it.rank} of {it.world_size}, {it.local_rank} of {it.local_world_size}\\n".encode())
"""


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_script_starts_all_processes(launcher: str, tmp_path: Path) -> None:
    scripts = [block.text for block in blocks(GUIDE / "several_hosts.md") if block.language == "bash"]
    (script,) = [text for text in scripts if ("srun torchrun" in text) == (launcher == "torchrun")]
    tasks = {"torchrun": 1, "srun": 8}[launcher]
    assert re.findall(r"#SBATCH --(nodes|ntasks-per-node)=(\d+)", script) == [
        ("nodes", "2"),
        ("ntasks-per-node", str(tasks)),
    ]
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        script = script.replace("29500", str(chosen.getsockname()[1]))
    files = {"job.sh": script, "scontrol": _SCONTROL, "srun": _SRUN, "train.py": TRAIN}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LAUNCHER": str(ROOT / "nxdpp/ranks"),
        "NODES": "2",
        "TASKS": str(tasks),
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "127.0.0.1",
    }
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, timeout=20).returncode == 0
    ended = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stderr
    expected = [f"{launcher} {rank} of 16, {rank % 8} of 8" for rank in range(16)]
    assert sorted(ended.stdout.splitlines()) == sorted(expected), ended.stdout + ended.stderr
