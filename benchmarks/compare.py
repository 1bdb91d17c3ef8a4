"""This runtime beside torch.distributed.pipelining and a loop written by hand, in one session and in alternation.

    python benchmarks/compare.py [--only efficiency|overhead|llama|memory] [--json FILE] [--quick]

Starts its own ranks (gloo, one thread each), prints one table and, with ``--json``, writes the same as JSON.
``--table FILE [--markdown]`` prints the table of such a file again and runs nothing.
docs/performance.md says what is measured.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from rich.console import Console  # noqa: E402

from benchmarks.compare.sections import SECTIONS, run_section  # noqa: E402
from benchmarks.compare.session import Effort, describe_session  # noqa: E402
from benchmarks.compare.table import print_markdown, print_table, read_rows, rows_as_json  # noqa: E402

FULL = Effort(warm_up=2, steps=12)
WIDTH = 150
"""Of the table where it goes to a file."""

QUICK = Effort(warm_up=1, steps=3)


def main(arguments: list[str] | None = None) -> None:
    """Run the sections asked for; a section that fails raises with what every rank said."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(SECTIONS), help="run one section; all of them by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the session as JSON")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.steps} steps a row, too few for a verdict")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a JSON file and run nothing")
    parser.add_argument("--markdown", action="store_true", help="with --table: for a document")
    asked = parser.parse_args(arguments)
    if asked.markdown and asked.table is None:
        parser.error("--markdown needs --table FILE: a run is written with --json first")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if asked.table is not None:
        content = json.loads(asked.table.read_text())
        rows, session = read_rows(content), content["session"]
        if asked.markdown:
            print_markdown(rows, session)
        else:
            print_table(console, rows, session)
        return
    effort = QUICK if asked.quick else FULL
    session = describe_session(effort)
    rows = [
        row
        for name in ([asked.only] if asked.only else SECTIONS)
        for row in run_section(name, effort, lambda text: console.print(f"[dim]{text}"))
    ]
    print_table(console, rows, session)
    if asked.json is not None:
        asked.json.write_text(rows_as_json(rows, session))


if __name__ == "__main__":
    main()
