"""What long schedules cost to make: all ranks' lists, checked, and one rank's list alone.

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
# The families whose ranks can be made alone.
ALONE = ("1f1b", "interleaved", "zb-v", "zb-h1", "zb1p")
RANKS, MICROBATCHES = 64, 1024
RANKS_ALONE, MICROBATCHES_ALONE = 1024, 4096


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


def one_rank(name: str, rounds: int) -> tuple[int, float]:
    """Actions and seconds of the slowest of the first, middle and last rank."""
    family = FAMILIES[name]
    ranks = (0, RANKS_ALONE // 2, RANKS_ALONE - 1)
    seconds = [
        measure(lambda at=rank: family.rank_actions(at, RANKS_ALONE, MICROBATCHES_ALONE, CHUNKS[name]), rounds)  # type: ignore[misc]
        for rank in ranks
    ]
    return len(family.rank_actions(0, RANKS_ALONE, MICROBATCHES_ALONE, CHUNKS[name])), max(seconds)


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
    alone = Table(title=f"One rank alone: p = {RANKS_ALONE}, m = {MICROBATCHES_ALONE}; CPU seconds")
    for column in ("schedule", "v", "actions", "build"):
        alone.add_column(column, justify="left" if column == "schedule" else "right")
    for name in ALONE:
        actions, seconds = one_rank(name, rounds)
        alone.add_row(name, str(CHUNKS[name]), f"{actions:,}", f"{seconds:.3f}")
    console.print(alone)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
