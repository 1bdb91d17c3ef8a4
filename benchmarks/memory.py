"""Memory of ranks that make their part of a model, and of ranks that wrap one of 405 billion parameters.

    python benchmarks/memory.py [--json FILE] [--quick] [--size SIZE] [--only WAY...] [--runs N]

The command starts its own processes and prints Markdown tables. benchmarks/results/memory.md describes the
measurements.
"""

import argparse
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from benchmarks.report import describe_session  # noqa: E402
from benchmarks.resident.measure import rows_of_ranks, rows_of_wraps  # noqa: E402
from benchmarks.resident.rows import rows_as_json, rows_as_markdown  # noqa: E402
from benchmarks.resident.ways import SIZES, WAYS, WRAP_RANKS  # noqa: E402

WRAP = "405b"
SIZE, QUICK_SIZE = "1b", "small"
RUNS = 3


def main(arguments: list[str] | None = None) -> None:
    """Measure the ways that were asked for; a failed process raises with its output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the session as JSON")
    parser.add_argument("--quick", action="store_true", help="a small model and one run, to try the command")
    parser.add_argument("--size", choices=list(SIZES), help=f"of the model that ranks make ({SIZE})")
    parser.add_argument("--only", nargs="+", choices=[*WAYS, WRAP], metavar="WAY", help=f"of {', '.join(WAYS)}, {WRAP}")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"runs of each row ({RUNS})")
    asked = parser.parse_args(arguments)
    if asked.runs < 1:
        parser.error(f"--runs {asked.runs} must be at least 1")
    if asked.quick and asked.size not in (None, QUICK_SIZE):
        parser.error(f"--quick uses --size {QUICK_SIZE}, not {asked.size}")
    if asked.json is not None and not asked.json.resolve().parent.is_dir():
        parser.error(f"--json {asked.json}: the folder does not exist")
    names = asked.only or [*WAYS, WRAP]
    runs = 1 if asked.quick else asked.runs
    size = QUICK_SIZE if asked.quick else asked.size or SIZE
    session = {**describe_session(), "runs": runs}
    rows = rows_of_ranks(size, [name for name in WAYS if name in names], runs)
    if WRAP in names:
        rows += rows_of_wraps([0, WRAP_RANKS - 1] if asked.quick else range(WRAP_RANKS))
    print(rows_as_markdown(rows, session))
    if asked.json is not None:
        asked.json.write_text(rows_as_json(rows, session))


if __name__ == "__main__":
    main()
