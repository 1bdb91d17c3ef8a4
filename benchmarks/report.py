"""Machine, versions and Markdown tables, for all benchmarks."""

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers


def describe_session() -> dict[str, str | int | float]:
    """Commit (with ``+`` where tracked files are changed), processor, memory, load and versions."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def session_line() -> str:
    """Return a line with the commit, the date, the load before and the machine, for a page."""
    session = describe_session()
    return (
        f"Commit {session['commit']}, {datetime.now(UTC):%Y-%m-%d}, load {session['load_before']} before. "
        f"{session['processor']}, {session['cores']} cores, Python {session['python']}, torch {session['torch']}."
    )


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> str:
    """A table in Markdown with padded cells; the columns named in ``left`` are aligned left, others right."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(columns))]
    padded = [
        [
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(line, widths, columns, strict=True)
        ]
        for line in lines
    ]
    rule = [
        "-" * width if name in left else "-" * (width - 1) + ":" for width, name in zip(widths, columns, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def _commit() -> str:
    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parent
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
