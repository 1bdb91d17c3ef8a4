"""CPU time of wrapping and tracing a Llama of 80 layers, in this tree and, in alternation, in another tree.

    python benchmarks/trace_speed.py
    git worktree add ../before COMMIT
    python benchmarks/trace_speed.py ../before

The model has the shapes of the 70B model and is on the meta device; the process is the last of 8 ranks. CPU time
depends less than wall time on other work of the machine. 20 traces take half a minute, twice as long with two trees.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.report import markdown_table  # noqa: E402

LARGE = {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
ROWS = ("wrapping", "trace of a step", "building the stages of a rank")
PROGRAM = Path(__file__).with_name("traces_on_demand.py")


def main(arguments: list[str] | None = None) -> None:
    """Print a table in Markdown: the median and the quartiles of each row, of each tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", help="root of another tree, to measure both")
    parser.add_argument("--traces", type=int, default=20, help="traces of each tree, after one")
    options = parser.parse_args(arguments)
    trees = [ROOT] if options.before is None else [options.before.resolve(), ROOT]
    taken = measure(trees, LARGE, options.traces)
    names = ["now"] if options.before is None else ["before", "now"]
    columns = ["CPU time", *(f"{name}, {unit}" for name in names for unit in ("median ms", "quartiles"))]
    cells = [[row, *(cell for tree in taken for cell in _cells(tree[row]))] for row in ROWS]
    print(markdown_table(columns, cells, left=columns[:1]))


def measure(trees: list[Path], sizes: dict[str, int], traces: int) -> list[dict[str, list[float]]]:
    """Return the CPU seconds of each row in each of ``trees``, one trace each in turn."""
    processes = [_start(root, sizes) for root in trees]
    taken: list[dict[str, list[float]]] = [{row: [] for row in ROWS} for _ in trees]
    try:
        for process in processes:
            _read(process, "ready")
        for number in range(traces):
            for process, rows in list(zip(processes, taken, strict=True))[:: 1 if number % 2 else -1]:
                assert process.stdin is not None
                print(file=process.stdin, flush=True)
                for row, seconds in zip(ROWS, _read(process).split(), strict=True):
                    rows[row].append(float(seconds))
    finally:
        for process in processes:
            process.communicate()
    return taken


def _start(root: Path, sizes: dict[str, int]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), json.dumps(sizes)]
    return subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _read(process: subprocess.Popen[str], expected: str | None = None) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line or expected not in (None, line):
        raise RuntimeError(f"{PROGRAM.name} ended or printed {line!r}; its error is above")
    return line


def _cells(seconds: list[float]) -> list[str]:
    low, median, high = (1000 * value for value in statistics.quantiles(seconds, n=4))
    return [f"{median:.1f}", f"{low:.1f} to {high:.1f}"]


if __name__ == "__main__":
    main()
