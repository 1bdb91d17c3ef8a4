"""Bytes, memory and step times of tensor x pipeline x data parallelism and ZeRO-1.

    python benchmarks/dimensions.py                    # about 3 minutes on 2 cores
    python benchmarks/dimensions.py --only bytes       # or times
    python benchmarks/dimensions.py --rounds 31        # more rounds of the times

Each layout is a small Llama on processes of this machine, by gloo. The first table compares the bytes that a rank sends
in a step, and the memory that it keeps, with formulas. The second one compares step times with torch's own.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.layouts.contenders import PAIRS, RANKS, time_rank
from benchmarks.layouts.job import Layout, Shape, least_bytes, plan
from benchmarks.layouts.step import DIMENSIONS, Measured, measure_rank
from tests.support.run_ranks import run_ranks

LAYOUTS = (
    Layout(2, 1, 1),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    Layout(1, 1, 2, True),
    Layout(2, 2, 1),
    Layout(2, 1, 2, True),
    Layout(1, 2, 2),
    Layout(1, 2, 2, True),
    Layout(2, 2, 2),
    Layout(2, 2, 2, True),
)
TIMED = Shape(hidden=256, middle=512, layers=4, batch=2, length=128, microbatches=4)
_TIMEOUT = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("bytes", "times"), help="one of the tables")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds of the times (15)")
    options = parser.parse_args(arguments)
    if options.only != "times":
        print(HEADER)
        for layout in LAYOUTS:
            print("\n".join(rows(layout, Shape())), flush=True)
    if options.only != "bytes":
        print("\n" + TIMES_HEADER)
        for pair in PAIRS:
            print(row_of_times(pair, TIMED, options.rounds), flush=True)


HEADER = (
    "| tensor x pipeline x data | stage | tensor, KB: least, plan, sent | pipeline: least, sent | data: least, sent "
    "| begun early | parameters, KB: plan, kept | gradients | optimizer |\n"
    "| --- | --- | --- | --- | --- | ---: | --- | --- | --- |"
)
TIMES_HEADER = (
    "| dimension | torch's own | its step, ms | nxdpp, ms | nxdpp / torch | its sent KB a step | nxdpp's |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
)


def rows(layout: Layout, shape: Shape) -> list[str]:
    """Return a row for each stage, of its rank that sends the most."""
    planned = plan(layout, shape)
    ranks: list[Measured] = run_ranks(layout.ranks, measure_rank, layout, shape, timeout=_TIMEOUT)
    lines = []
    for stage, summary in enumerate(planned):
        measured = max((rank for rank in ranks if rank.stage == stage), key=lambda rank: sum(rank.sent.values()))
        least = least_bytes(layout, shape, summary, stage)
        assert not measured.sent["other"], "groups of no dimension send no numbers"
        state = summary.state
        cells = [
            str(layout),
            str(stage),
            f"{_kb(least['tensor'])} {_kb(summary.traffic.tensor)} {_kb(measured.sent['tensor'])}",
            *(f"{_kb(least[dimension])} {_kb(measured.sent[dimension])}" for dimension in DIMENSIONS[:2]),
            f"{measured.early:.0%}" if layout.data > 1 and not layout.zero1 else "",
            f"{_kb(state.weights)} {_kb(measured.parameters)}",
            f"{_kb(state.gradients)} {_kb(measured.gradients)}",
            f"{_kb(state.optimizer)} {_kb(measured.optimizer)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row_of_times(pair: str, shape: Shape, rounds: int) -> str:
    """Return a row of medians of the slower rank."""
    ranks = run_ranks(RANKS, time_rank, pair, shape, rounds, timeout=_TIMEOUT)
    (ours, theirs) = (max(each, key=lambda timed: timed.seconds) for each in zip(*ranks, strict=True))
    cells = [pair, theirs.name, f"{theirs.seconds * 1e3:.0f}", f"{ours.seconds * 1e3:.0f}"]
    cells += [f"{ours.seconds / theirs.seconds:.2f}", _kb(theirs.sent), _kb(ours.sent)]
    return f"| {' | '.join(cells)} |"


def _kb(size: float) -> str:
    return f"{size / 1000:,.1f}" if size else "0"


if __name__ == "__main__":
    main()
