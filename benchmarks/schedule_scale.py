"""CPU seconds and memory of long schedules: the lists of all ranks, verified, and the list of one rank alone.

    python benchmarks/schedule_scale.py [--rounds N]

Medians of several rounds on one core, without torch. Memory is the peak above the memory before.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from nxdpp.schedules.check import check  # noqa: E402
from nxdpp.schedules.families.registry import FAMILIES  # noqa: E402
from nxdpp.schedules.simulate import simulate  # noqa: E402
from tests.support.process_memory import peak_bytes  # noqa: E402

CHUNKS = {"1f1b": 1, "interleaved": 4, "zb-v": 2, "zb-h1": 1, "zb1p": 4, "v-half": 2, "v-min": 2}
ALONE = ("1f1b", "interleaved", "zb-v", "zb-h1", "zb1p")
"""Families that build the list of one rank alone."""

RANKS, MICROBATCHES = 64, 1024
RANKS_ALONE, MICROBATCHES_ALONE = 1024, 4096


def main() -> None:
    """Print both tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"All ranks: p = {RANKS}, m = {MICROBATCHES}\n")
    print(
        "| schedule | v | actions | build | check | simulate | MiB |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for name, chunks in CHUNKS.items():
        # A process of its own, for its memory.
        with get_context("spawn").Pool(1) as pool:
            actions, *seconds, memory = pool.apply(all_ranks, (name, rounds))
        print(f"| {name} | {chunks} | {actions:,} | {' | '.join(f'{each:.2f}' for each in seconds)} | {memory:.0f} |")
    print(f"\nOne rank alone: p = {RANKS_ALONE}, m = {MICROBATCHES_ALONE}\n")
    print("| schedule | v | actions | build |\n| --- |" + " ---: |" * 3)
    for name in ALONE:
        actions, slowest = one_rank(name, rounds)
        print(f"| {name} | {CHUNKS[name]} | {actions:,} | {slowest:.3f} |")


def all_ranks(name: str, rounds: int) -> tuple[int, float, float, float, float]:
    """Number of actions, seconds to build, check and simulate, and MiB at the peak of the first two."""
    family, chunks = FAMILIES[name], CHUNKS[name]
    before = peak_bytes()
    build = _median_seconds(lambda: family.build(RANKS, MICROBATCHES, chunks), rounds)
    schedule = family.build(RANKS, MICROBATCHES, chunks)
    checked = _median_seconds(lambda: check(schedule), rounds)
    memory = (peak_bytes() - before) / 2**20
    simulated = _median_seconds(lambda: simulate(schedule), rounds)
    return sum(map(len, schedule)), build, checked, simulated, memory


def one_rank(name: str, rounds: int) -> tuple[int, float]:
    """Number of actions, and seconds of the slowest of the first, middle and last rank."""
    family, chunks = FAMILIES[name], CHUNKS[name]

    def build(rank: int) -> int:
        return len(family.rank_actions(rank, RANKS_ALONE, MICROBATCHES_ALONE, chunks))

    ranks = (0, RANKS_ALONE // 2, RANKS_ALONE - 1)
    return build(0), max(_median_seconds(lambda at=rank: build(at), rounds) for rank in ranks)  # type: ignore[misc]


def _median_seconds(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
