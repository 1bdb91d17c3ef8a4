"""Time and memory of saves and loads of checkpoints, next to torch's and transformers' own.

    python benchmarks/checkpoint.py                                # on an idle machine
    python benchmarks/checkpoint.py --write benchmarks/results/checkpoints.md  # also writes the tables into the page
    python benchmarks/checkpoint.py --quick                        # a small model, to try the command

A Llama of 44 million parameters in float32, with the state of AdamW and without, on pipelines of 1, 2 and 4 ranks, by
each way in turn. The files need 2 GB of the disk. Loads read files that the page cache does not have, then those that
it has.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_blocks
from benchmarks.report import markdown_table, session_line
from benchmarks.stored.measured import Rank, measure_rank
from benchmarks.stored.ways import Ours, Size
from tests.support.run_ranks import run_ranks

SIZE, QUICK_SIZE = Size(768, 4), Size(64, 4, 256)
RANKS, QUICK_RANKS = (1, 2, 4), (2,)
SAVES, LOADS, STEPS = "checkpoint saves", "checkpoint loads", "steps beside a save"
_CONTENTS = {True: "weights, AdamW", False: "weights"}
_MEGABYTE = 1e6
_TIMEOUT = 900.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables in Markdown, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, 2 ranks and one round, to try the command")
    parser.add_argument("--hidden", type=int, default=SIZE.hidden, metavar="N", help="width: 1088 for 1 GB (768)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of all ways (5)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="on the file system to measure")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables between their marks in this page")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    size = replace(SIZE, hidden=options.hidden)
    size, counts, rounds = (QUICK_SIZE, QUICK_RANKS, 1) if options.quick else (size, RANKS, options.rounds)
    session = session_line()
    rows: dict[str, list[list[str]]] = {SAVES: [], LOADS: [], STEPS: []}
    for content in _CONTENTS:
        for count in counts:
            with tempfile.TemporaryDirectory(prefix="nxdpp-checkpoint-", dir=options.folder) as folder:
                ranks = run_ranks(count, measure_rank, size, content, rounds, Path(folder), timeout=_TIMEOUT)
            for name, found in rows_of(_CONTENTS[content], ranks).items():
                rows[name] += found
    columns = {
        SAVES: ["saved", "ranks", "way", "held (s)", "on the disk (s)", "to nxdpp", "GB/s", "peak (MB)"],
        LOADS: ["loaded", "ranks", "way", "cold (s)", "to nxdpp", "warm (s)", "to nxdpp", "GB/s, warm", "peak (MB)"],
        STEPS: ["saved", "ranks", "step alone (s)", "beside a save (s)", "ratio"],
    }
    blocks = {}
    for name, titles in columns.items():
        blocks[name] = f"{session}\n\n{markdown_table(titles, rows[name], left=['saved', 'loaded', 'way'])}"
        print(f"{blocks[name]}\n", flush=True)
    if options.write is not None:
        write_blocks(options.write, blocks)


def rows_of(content: str, ranks: Sequence[Rank]) -> dict[str, list[list[str]]]:
    """The rows of each table for one number of ranks: the slowest rank's time, and the largest peak."""
    total = sum(rank.owned for rank in ranks)
    saved, count = f"{content}, {total / _MEGABYTE:.0f} MB", str(len(ranks))

    def largest(title: str, key: str) -> float:
        return max(float(getattr(rank.ways[title], key)) for rank in ranks)

    rows: dict[str, list[list[str]]] = {SAVES: [], LOADS: [], STEPS: []}
    ours = Ours.title
    for title in ranks[0].ways:
        held, whole, peak = (largest(title, key) for key in ("held", "whole", "save_peak"))
        ratio = whole / largest(ours, "whole")
        figures = [f"{held:.3f}", f"{whole:.3f}", f"{ratio:.2f}", _rate(total, whole), f"{peak / _MEGABYTE:.0f}"]
        rows[SAVES].append([saved, count, title, *figures])
        cold, warm, peak = (largest(title, key) for key in ("cold", "warm", "load_peak"))
        if isnan(cold):
            continue
        figures = [f"{cold:.3f}", f"{cold / largest(ours, 'cold'):.2f}"]
        figures += [f"{warm:.3f}", f"{warm / largest(ours, 'warm'):.2f}", _rate(total, warm), f"{peak / _MEGABYTE:.0f}"]
        rows[LOADS].append([saved, count, title, *figures])
    alone, beside = max(rank.alone for rank in ranks), max(rank.beside for rank in ranks)
    if not isnan(alone):
        rows[STEPS].append([saved, count, f"{alone:.3f}", f"{beside:.3f}", f"{beside / alone:.2f}"])
    return rows


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.2f}"


if __name__ == "__main__":
    main()
