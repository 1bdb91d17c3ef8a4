"""This runtime next to torch.distributed.pipelining and a hand-written loop, in one session and in alternation.

    python benchmarks/compare.py [--only efficiency|overhead|llama|memory] [--json FILE] [--quick] [--write]

The command starts its own ranks (gloo, one thread each) and prints Markdown tables. docs/performance.md describes
the measurements and has results.
"""

import argparse
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from benchmarks.comparison import efficiency, llama, memory, overhead, page  # noqa: E402
from benchmarks.comparison.rows import rows_as_json, rows_as_markdown  # noqa: E402
from benchmarks.comparison.timing import Effort  # noqa: E402
from benchmarks.report import describe_session  # noqa: E402

SECTIONS = {"efficiency": efficiency, "overhead": overhead, "llama": llama, "memory": memory}
FULL, QUICK = Effort(warm_up=2, steps=12), Effort(warm_up=1, steps=3)


def main(arguments: list[str] | None = None) -> None:
    """Run the sections that were asked for; a failed section raises with the output of every rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(SECTIONS), help="run one section; all of them by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the session as JSON")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.steps} steps a row, too few for a verdict")
    parser.add_argument("--write", action="store_true", help="also write the tables and the picture of the pages")
    asked = parser.parse_args(arguments)
    session = {**describe_session(), **(QUICK if asked.quick else FULL)._asdict()}
    rows = []
    for name in [asked.only] if asked.only else SECTIONS:
        print(f"measuring {name}", file=sys.stderr)
        rows += SECTIONS[name].measure(QUICK if asked.quick else FULL)
    print(rows_as_markdown(rows, session))
    if asked.write:
        page.write(rows, session)
    if asked.json is not None:
        asked.json.write_text(rows_as_json(rows, session))


if __name__ == "__main__":
    main()
