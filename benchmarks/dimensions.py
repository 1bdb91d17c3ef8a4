"""Bytes, memory and step times of tensor x pipeline x data parallelism and ZeRO-1.

    python benchmarks/dimensions.py                                # about 6 minutes on 2 cores
    python benchmarks/dimensions.py --write benchmarks/results/dimensions.md  # also writes the tables into the page
    python benchmarks/dimensions.py --only bytes                   # or average, times
    python benchmarks/dimensions.py --rounds 5                     # fewer rounds of each time

Each job is a small model on processes of this machine, by gloo. ``bytes`` compares the bytes that a rank sends in a
step, and its memory, with formulas; load does not matter. ``average`` has the share of the data-parallel average that
the backward hides, and ``times`` the step next to torch's own: both need an idle machine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.layouts import tables
from benchmarks.layouts.contenders import PAIRS, RANKS, time_rank
from benchmarks.layouts.hidden import Case, Sleepers, time_average
from benchmarks.layouts.job import Layout, Shape
from benchmarks.layouts.step import measure_rank
from benchmarks.page import write_blocks
from benchmarks.report import session_line
from tests.support.run_ranks import run_ranks

LAYOUTS = (
    Layout(2, 1, 1),
    Layout(2, 1, 1, sequence=True),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    Layout(1, 1, 2, True),
    Layout(2, 2, 1),
    Layout(2, 2, 1, sequence=True),
    Layout(2, 1, 2, True),
    Layout(1, 2, 2),
    Layout(1, 2, 2, True),
    Layout(2, 2, 2),
    Layout(2, 2, 2, True),
)
SHAPE = Shape(hidden=256, middle=512, layers=4, batch=2, length=128, microbatches=4)
CASES = (
    Case("Llama", Shape(hidden=512, middle=1376, layers=8, heads=8, vocabulary=4096, batch=1, length=64)),
    Case("sleeping layers", Sleepers()),
    Case("sleeping layers", Sleepers(), stages=2),
)
SECTIONS = ("bytes", "average", "times")
_TIMEOUT = 500.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables in Markdown, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help="one of the sections")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds of each time (15)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables between their marks in this page")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds} must be at least 2: quartiles need two")
    session = session_line()
    blocks: dict[str, str] = {}
    for section in SECTIONS:
        if options.only in (None, section):
            for name, table in measure(section, options.rounds).items():
                blocks[name] = f"{session}\n\n{table}"
                print(f"{blocks[name]}\n", flush=True)
    if options.write is not None:
        write_blocks(options.write, blocks)


def measure(section: str, rounds: int) -> dict[str, str]:
    """Return the tables of a section by name."""
    if section == "bytes":
        rows = [
            row
            for layout in LAYOUTS
            for row in tables.layout_rows(
                layout, SHAPE, run_ranks(layout.ranks, measure_rank, layout, SHAPE, timeout=_TIMEOUT)
            )
        ]
        sent, memory = zip(*rows, strict=True)
        return {"bytes": tables.table(tables.BYTES, sent), "memory": tables.table(tables.MEMORY, memory)}
    if section == "average":
        average = [
            row
            for case in CASES
            for row in tables.average_rows(case, run_ranks(case.ranks, time_average, case, rounds, timeout=_TIMEOUT))
        ]
        return {section: tables.table(tables.AVERAGE, average)}
    times = [
        tables.times_row(pair, run_ranks(RANKS, time_rank, pair, SHAPE, rounds, timeout=_TIMEOUT)) for pair in PAIRS
    ]
    return {section: tables.table(tables.TIMES, times)}


if __name__ == "__main__":
    main()
