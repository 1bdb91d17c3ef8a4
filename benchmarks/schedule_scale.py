"""CPU seconds and memory of building, checking and simulating long schedules.

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
RANKS, MICROBATCHES = 64, 1024


def main() -> None:
    """Print a table in Markdown."""
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


def _median_seconds(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
