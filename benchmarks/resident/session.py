"""What a reader must know of the machine and the code to judge the numbers."""

import os
import subprocess
from pathlib import Path
from typing import Any

import transformers

from benchmarks.compare.session import describe_machine


def describe_session(runs: int) -> dict[str, Any]:
    """Machine, versions, commit (with ``+`` where files are changed) and how often each row was run."""
    return {
        **describe_machine(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "transformers": transformers.__version__,
        "commit": _commit(),
        "runs": runs,
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parent
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")
