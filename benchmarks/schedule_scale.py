"""Cost of building, checking and simulating long schedules.

    python -m benchmarks.schedule_scale

In one process, on one core, without torch; CPU time, the median of several rounds. Memory is the peak of the process
over that before.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from nxdpp.schedules.check import check
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate

# Chunks a rank.
CHUNKS = {"1f1b": 1, "interleaved": 4, "zb-v": 2, "zb-h1": 1, "zb1p": 4, "v-half": 2, "v-min": 2}
RANKS, MICROBATCHES = 64, 1024


def measure(work: Callable[[], object], rounds: int) -> float:
    """Median CPU seconds of ``work``."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def all_ranks(name: str, rounds: int) -> tuple[int, float, float, float, float]:
    """Actions, seconds to build, check and simulate, and MiB at the peak."""
    family, chunks = FAMILIES[name], CHUNKS[name]
    before = _peak()
    build = measure(lambda: family.build(RANKS, MICROBATCHES, chunks), rounds)
    schedule = family.build(RANKS, MICROBATCHES, chunks)
    checked = measure(lambda: check(schedule), rounds)
    memory = _peak() - before
    simulated = measure(lambda: simulate(schedule), rounds)
    return sum(map(len, schedule)), build, checked, simulated, memory


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    console = Console()
    whole = Table(title=f"All ranks: p = {RANKS}, m = {MICROBATCHES}; CPU seconds")
    for column in ("schedule", "v", "actions", "build", "check", "build + check", "simulate", "MiB"):
        whole.add_column(column, justify="left" if column == "schedule" else "right")
    for name, chunks in CHUNKS.items():
        # In a process of its own, for its memory.
        with get_context("spawn").Pool(1) as pool:
            actions, build, checked, simulated, memory = pool.apply(all_ranks, (name, rounds))
        figures = [f"{seconds:.2f}" for seconds in (build, checked, build + checked, simulated)]
        whole.add_row(name, str(chunks), f"{actions:,}", *figures, f"{memory:.0f}")
    console.print(whole)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
