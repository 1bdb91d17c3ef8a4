"""Microseconds a microbatch of this tree and of another tree, with stages that compute next to nothing.

    git worktree add ../before COMMIT
    python benchmarks/before_and_after.py ../before                                  # 18 rows, 8 starts of processes
    python benchmarks/before_and_after.py ../before --message 4                      # messages of 4 KiB, not of 512
    python benchmarks/before_and_after.py ../before --only 1f1b --ranks 2 --starts 1 # one row, a minute

Both trees run at the same time, one step each in turn, in processes of their own. The processes are started several
times, because the ratios of two starts differ by up to 7 %. The last column is the median over the starts of the ratio
of the medians. Standard error has the seconds that each start took.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.report import markdown_table  # noqa: E402
from nxdpp.schedules.families.registry import FAMILIES, find_family  # noqa: E402

RANKS, MICROBATCHES = (2, 4), 32
UNITS = ("wall", "CPU", "main thread")
PROGRAM = Path(__file__).with_name("steps_on_demand.py")


class Seconds(NamedTuple):
    """Seconds of a step: until the last rank is done, processor time of all ranks, and of their main threads."""

    wall: float
    cpu: float
    main: float


# For each family the seconds of its steps before and now.
_Times = dict[str, tuple[list[Seconds], ...]]


class Tree:
    """Processes that run steps with the nxdpp of one tree."""

    def __init__(self, root: Path, ranks: int, families: dict[str, int], message: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        given = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        text = {name: str(value) for name, value in given.items()}
        environment = {**os.environ, **text, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        job = json.dumps([ranks, MICROBATCHES, families, message])
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), job],
                cwd=root,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for line in self._lines():
            assert line == "ready\n", f"{root}: {line}"

    def step(self, family: str) -> Seconds:
        """Run one step."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{family}\n")
            process.stdin.flush()
        wall, cpu, main = zip(*(map(float, line.split()) for line in self._lines()), strict=True)
        return Seconds(max(wall), sum(cpu), sum(main))

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _lines(self) -> list[str]:
        return [process.stdout.readline() for process in self._processes if process.stdout is not None]


def main() -> None:
    """Print a table in Markdown for each number of ranks as soon as it is measured: a row for each family and unit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="root of the other tree")
    parser.add_argument("--only", choices=FAMILIES, action="append", help="family, may be repeated; all by default")
    parser.add_argument("--ranks", type=int, choices=RANKS, action="append", help="may be repeated; all by default")
    parser.add_argument("--starts", type=int, default=4, help="starts of the processes")
    parser.add_argument("--steps", type=int, default=30, help="steps of each family and start, after 5")
    parser.add_argument("--message", type=int, default=512, help="KiB of a message between two stages")
    options = parser.parse_args()
    families = {name: find_family(name).default_chunks for name in options.only or FAMILIES}
    columns = ("ranks", "family", "time", "before, µs", "now, µs", "ratios", "now / before")
    for ranks in options.ranks or RANKS:
        starts = []
        for number in range(1, options.starts + 1):
            began = time.perf_counter()
            starts.append(_start(options.before.resolve(), ranks, families, options))
            taken = time.perf_counter() - began
            print(f"{ranks} ranks: start {number} of {options.starts} took {taken:.0f} s", file=sys.stderr)
        cells = [row for family in families for row in _rows(f"p={ranks}", family, [start[family] for start in starts])]
        print(markdown_table(columns, cells, left=columns[:3]), flush=True)


def _rows(ranks: str, family: str, starts: list[tuple[list[Seconds], ...]]) -> list[list[str]]:
    rows = []
    for unit, name in enumerate(UNITS):
        pairs = [tuple(statistics.median(s[unit] for s in side) for side in start) for start in starts]
        micro = [1e6 * statistics.median(side) / MICROBATCHES for side in zip(*pairs, strict=True)]
        ratios = sorted(now / before for before, now in pairs)
        row = [ranks, family, name, *(f"{value:,.0f}" for value in micro)]
        rows.append([*row, f"{ratios[0]:.3f} to {ratios[-1]:.3f}", f"{statistics.median(ratios):.3f}"])
    return rows


def _start(before: Path, ranks: int, families: dict[str, int], options: argparse.Namespace) -> _Times:
    """Return the times of each family's steps, before and now, of one start of the processes."""
    trees = [Tree(root, ranks, families, options.message) for root in (before, ROOT)]
    times: _Times = {family: ([], []) for family in families}
    try:
        for step in range(-5, options.steps):
            for family, taken in times.items():
                for tree, seconds in list(zip(trees, taken, strict=True))[:: 1 if step % 2 else -1]:
                    seconds.append(tree.step(family))
        return {family: tuple(seconds[5:] for seconds in taken) for family, taken in times.items()}
    finally:
        for tree in trees:
            tree.end()


if __name__ == "__main__":
    main()
