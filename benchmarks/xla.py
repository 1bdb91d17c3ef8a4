"""Steps of a small Llama on XLA ranks, next to one XLA process without nxdpp and to the CPU over the same ranks.

    python benchmarks/xla.py                        # on an idle machine, in an environment with torch_xla: 4 minutes
    python benchmarks/xla.py --write benchmarks/results/xla.md    # also writes the tables into the page
    python benchmarks/xla.py --quick                # a tiny model and 2 ranks, to try the command

All jobs are started together, and run one step each in turn. Tables have medians. In every second step each copy to
the host begins after the device has ended its work, and the rank waits for it. Such a step shows what only copies
cost, and its time what is saved where they overlap. Ranks have one thread; XLA has its own.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.in_turn.llama_steps import FIRST, Copies, Rank, Size, Step, measure
from benchmarks.in_turn.turns import Job, run_in_turn
from benchmarks.page import write_blocks
from benchmarks.report import markdown_table, session_line

SIZE, QUICK_SIZE = Size(), Size(hidden=32, layers=2, vocabulary=64, microbatches=2, microbatch=1, length=16)
RANKS, QUICK_RANKS = (1, 2, 4), (2,)
STEPS, SHARES, COPIES = "xla steps", "xla shares", "xla copies"
PLAIN = "one XLA process, without nxdpp"
_TIMEOUT = 550.0
_LARGEST_DIFFERENCE = 1e-3

Results = dict[str, list[Rank]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables in Markdown, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and 2 ranks, to try the command")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="measured steps of each job (12)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables between their marks in this page")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps} must be at least 1")
    if find_spec("torch_xla") is None:
        parser.error("torch_xla is not installed: pip install '.[xla]' -c constraints-xla.txt in an environment")
    size, counts, steps = (QUICK_SIZE, QUICK_RANKS, 2) if options.quick else (SIZE, RANKS, options.steps)
    session = session_line()
    results = run_in_turn(jobs_of(size, counts), FIRST + 2 * steps, _TIMEOUT)
    check_losses(results)
    blocks = {name: f"{session}\n\n{table}" for name, table in tables_of(results, counts).items()}
    for block in blocks.values():
        print(f"{block}\n", flush=True)
    if options.write is not None:
        write_blocks(options.write, blocks)


def jobs_of(size: Size, counts: Sequence[int]) -> dict[str, Job]:
    """The jobs, by their names in the tables."""
    jobs = {PLAIN: Job(1, measure, (size, 1, "xla", True))}
    for device in ("xla", "cpu"):
        jobs |= {_name(device, count): Job(count, measure, (size, count, device, False)) for count in counts}
    return jobs


def check_losses(results: Results) -> None:
    """End the program if a job's losses differ from the CPU's: it would have timed different work."""
    first, *others = results.values()
    for ranks in others:
        pairs = zip(ranks[-1].losses, first[-1].losses, strict=True)
        if max(abs(own - other) for own, other in pairs) > _LARGEST_DIFFERENCE:
            raise SystemExit(f"losses differ: {ranks[-1].losses} and {first[-1].losses}")


def tables_of(results: Results, counts: Sequence[int]) -> dict[str, str]:
    """The tables in Markdown, by the names of their marks."""
    return {
        STEPS: markdown_table(
            ["job", "step (ms)", "processor (ms)", "to the CPU", "graphs a rank", "first 2 steps (s)", "compiling (s)"],
            _step_rows(results, counts),
            left=["job"],
        ),
        SHARES: markdown_table(
            ["ranks", "device computes", "rank waits for messages", "rank copies to the device", "rank records graphs"],
            [_share_row(results[_name("xla", count)], count) for count in counts],
            left=[],
        ),
        COPIES: markdown_table(
            ["ranks", "copies a step", "KiB each", "to the host (µs)", "to the device (µs)", "step (ms)", "apart (ms)"],
            [_copy_row(results[_name("xla", count)], count) for count in counts],
            left=[],
        ),
    }


def _step_rows(results: Results, counts: Sequence[int]) -> list[list[str]]:
    on_cpu = {_name(kind, count): _wall(results[_name("cpu", count)]) for kind in ("xla", "cpu") for count in counts}
    on_cpu[PLAIN] = _wall(results[_name("cpu", counts[0])])
    rows = []
    for name, ranks in results.items():
        wall = _wall(ranks)
        processor = statistics.median(sum(step.processor for step in steps) for steps in _by_step(ranks))
        first = sum(max(rank.first[number].seconds for rank in ranks) for number in range(FIRST))
        graphs, compiling = max(rank.graphs for rank in ranks), max(rank.compile_seconds for rank in ranks)
        cells = [
            _ms(wall),
            _ms(processor),
            f"{wall / on_cpu[name]:.2f}",
            str(graphs),
            f"{first:.1f}",
            f"{compiling:.1f}",
        ]
        rows.append([name, *cells])
    return rows


def _share_row(ranks: list[Rank], count: int) -> list[str]:
    """Means over the ranks of one job, each of the median step."""

    def share(of_step: Callable[[Step], float]) -> float:
        return statistics.mean(statistics.median(map(of_step, rank.steps)) for rank in ranks)

    busy = share(lambda step: step.busy)
    waiting, inwards = share(lambda step: step.waiting / step.seconds), share(lambda s: s.inwards.seconds / s.seconds)
    return [str(count), *(f"{part:.0%}" for part in (busy, waiting, inwards, 1 - waiting - inwards))]


def _copy_row(ranks: list[Rank], count: int) -> list[str]:
    outwards = [step.outwards for rank in ranks for step in rank.apart if step.outwards.count]
    inwards = [step.inwards for rank in ranks for step in rank.apart if step.inwards.count]
    cells = [
        str(max((copies.count for copies in outwards), default=0)),
        _each(outwards, lambda copies: copies.bytes / 1024),
        _each(outwards, lambda copies: 1e6 * copies.seconds),
        _each(inwards, lambda copies: 1e6 * copies.seconds),
    ]
    return [str(count), *cells, _ms(_wall(ranks)), _ms(_wall(ranks, is_apart=True))]


def _name(device: str, count: int) -> str:
    return f"{device.upper()}, {count} rank{'s' * (count > 1)}"


def _by_step(ranks: list[Rank], is_apart: bool = False) -> list[tuple[Step, ...]]:
    """The steps of all ranks together."""
    return list(zip(*(rank.apart if is_apart else rank.steps for rank in ranks), strict=True))


def _wall(ranks: list[Rank], is_apart: bool = False) -> float:
    """Median seconds until the last rank is done."""
    return statistics.median(max(step.seconds for step in steps) for steps in _by_step(ranks, is_apart))


def _each(copies: list[Copies], amount: Callable[[Copies], float]) -> str:
    """Median over the steps of the amount of one copy."""
    return f"{statistics.median(amount(of_step) / of_step.count for of_step in copies):.0f}" if copies else "none"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


if __name__ == "__main__":
    main()
