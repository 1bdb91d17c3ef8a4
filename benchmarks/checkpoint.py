"""Time and memory of saves and loads of checkpoints, beside torch's and transformers' own.

    python benchmarks/checkpoint.py                                # on an idle machine
    python benchmarks/checkpoint.py --write docs/checkpoints.md    # also writes the tables into the page
    python benchmarks/checkpoint.py --quick                        # a small model, to try the command

The weights of a Llama on a pipeline of 2 ranks, by each way in turn. Loads read files that are in memory.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_blocks
from benchmarks.report import markdown_table, session_line
from benchmarks.stored.ways import RANKS, Measured, Size, measure_rank
from tests.support.run_ranks import run_ranks

SIZE, QUICK_SIZE = Size(1024, 12), Size(64, 2, 256)
_MEGABYTE = 1e6
_TIMEOUT = 1500.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables in Markdown, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and one round, to try the command")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of all ways (7)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="on the file system to measure")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables between their marks in this page")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    size, rounds = (QUICK_SIZE, 1) if options.quick else (SIZE, options.rounds)
    session = session_line()
    with tempfile.TemporaryDirectory(prefix="nxdpp-checkpoint-", dir=options.folder) as folder:
        ranks = run_ranks(RANKS, measure_rank, size, rounds, Path(folder), timeout=_TIMEOUT)
    blocks = {}
    for what in ("save", "load"):
        blocks[f"checkpoint {what}s"] = f"{session}\n\n{table(what, ranks)}"
        print(f"{blocks[f'checkpoint {what}s']}\n", flush=True)
    if options.write is not None:
        write_blocks(options.write, blocks)


def table(what: str, ranks: Sequence[tuple[int, dict[str, dict[str, Measured]]]]) -> str:
    """The table of ``"save"`` or ``"load"``: the slower rank's time, and the larger peak."""
    total = sum(owned for owned, _ in ranks)
    rows = []
    for title in ranks[0][1]:
        measured = [ways[title][what] for _, ways in ranks]
        whole = max(one.whole for one in measured)
        held = [f"{max(one.held for one in measured):.3f}"] if what == "save" else []
        peak = max(one.peak for one in measured) / _MEGABYTE
        rows.append([title, *held, f"{whole:.3f}", f"{total / whole / 1e9:.2f}", f"{peak:.0f}"])
    times = ["held (s)", "on the disk (s)"] if what == "save" else ["loaded (s)"]
    largest = max(owned for owned, _ in ranks) / _MEGABYTE
    columns = ["way", *times, "GB/s", "peak above the weights (MB)"]
    table = markdown_table(columns, rows, left=["way"])
    return f"{table}\n\n{total / _MEGABYTE:.0f} MB in all, {largest:.0f} MB on the larger rank."


if __name__ == "__main__":
    main()
