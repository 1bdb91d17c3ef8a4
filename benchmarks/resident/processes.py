"""Running a measured program in fresh processes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 900


def run_ranks(ranks: int, program: str, *arguments: str) -> list[dict[str, Any]]:
    """What each of ``ranks`` processes of the module ``program`` reported, in rank order; torchrun starts them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _run([*launcher, "-m", program, *arguments], ranks)


def run_alone(program: str, *arguments: str) -> dict[str, Any]:
    """What one process of the module ``program`` reported, without a launcher."""
    return _run(["-m", program, *arguments], 1)[0]


def _run(command: list[str], ranks: int) -> list[dict[str, Any]]:
    """The program gets, as its last argument, the folder to report to. A failure raises with all that was printed."""
    with tempfile.TemporaryDirectory(prefix="nxdpp-memory-") as folder:
        done = subprocess.run(
            [sys.executable, *command, folder],
            cwd=_ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _environment() -> dict[str, str]:
    """One thread a process; the paths of this one, which may run from the sources."""
    paths = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
