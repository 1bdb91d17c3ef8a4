"""How much memory ranks take to come to their part of a model, and to wrap one of 405 billion parameters.

    python benchmarks/memory.py [--json FILE] [--quick] [--size SIZE] [--only WAY...] [--runs N] [--markdown]

Starts its own processes, prints one table and, with ``--json``, writes the same as JSON. docs/memory.md says what is
measured.
"""

import argparse
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from rich.console import Console  # noqa: E402

from benchmarks.resident.measure import rows_of_ranks, rows_of_wraps  # noqa: E402
from benchmarks.resident.published import LLAMA_3_1_405B_STAGES, SIZES  # noqa: E402
from benchmarks.resident.rows import rows_as_json  # noqa: E402
from benchmarks.resident.session import describe_session  # noqa: E402
from benchmarks.resident.table import print_markdown, print_table  # noqa: E402
from benchmarks.resident.ways import WAYS  # noqa: E402

WRAP = "405b"
SIZE, QUICK_SIZE = "1b", "small"
RUNS = 3
WIDTH = 150
"""Of the table where it goes to a file."""


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for; a process that fails raises with what it printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the session as JSON")
    parser.add_argument("--quick", action="store_true", help="a small model and one run, to see that all works")
    parser.add_argument("--size", choices=list(SIZES), help=f"of the model that ranks make ({SIZE})")
    parser.add_argument("--only", nargs="+", choices=[*WAYS, WRAP], metavar="WAY", help=f"of {', '.join(WAYS)}, {WRAP}")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"runs of each row ({RUNS})")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    asked = parser.parse_args(arguments)
    if asked.runs < 1:
        parser.error(f"--runs {asked.runs} must be at least 1")
    if asked.quick and asked.size not in (None, QUICK_SIZE):
        parser.error(f"--quick is with --size {QUICK_SIZE}, not {asked.size}")
    if asked.json is not None and not asked.json.resolve().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no such folder")
    names = asked.only or [*WAYS, WRAP]
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    runs = 1 if asked.quick else asked.runs
    session = describe_session(runs)

    def say(text: str) -> None:
        Console(stderr=True).print(f"[dim]{text}")

    size = QUICK_SIZE if asked.quick else asked.size or SIZE
    rows = rows_of_ranks(size, [name for name in WAYS if name in names], runs, say)
    if WRAP in names:
        last = LLAMA_3_1_405B_STAGES - 1
        rows += rows_of_wraps([0, last] if asked.quick else range(last + 1), say)
    if asked.markdown:
        print_markdown(rows, session)
    else:
        print_table(console, rows, session)
    if asked.json is not None:
        asked.json.write_text(rows_as_json(rows, session))


if __name__ == "__main__":
    main()
