"""The first hour on a machine with accelerators: numbers, waits, faults and speed on its devices, in one JSON.

    python benchmarks/gpu.py                                # an hour at most; this machine's accelerators
    python benchmarks/gpu.py --part one --part schedules    # these parts
    python benchmarks/gpu.py --dry                          # small models on the CPU, over gloo: a minute

Each part runs in processes of its own, for its limit at most. A case that fails or hangs does not stop the next one.
The command ends with status 1 if a case has failed or hung. Its last line is a row for benchmarks/results/gpus.md.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.first_hour.parts import PARTS, Part  # noqa: E402
from benchmarks.first_hour.place import Place, find_place  # noqa: E402
from benchmarks.first_hour.start import FAILED, HUNG, NOT_RUN, NOTHING, PASSED  # noqa: E402
from benchmarks.report import describe_session  # noqa: E402

ABSENT = "not on this device"
COLUMNS = ("machine", "torch, commit", *PARTS, "ms of a step")
"""Columns of benchmarks/results/gpus.md; a part has the number of its cases that passed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and write their results after each; exit status 1 if a case has failed or hung."""
    minutes = "\n".join(f"  {name:<11}{part.limit / 60:>4.0f} min at most  {part.text}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"parts:\n{minutes}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="run this part; may be repeated")
    parser.add_argument("--device", metavar="TYPE", help="a type of torch, such as cuda, xpu or hpu; cpu; or fake")
    parser.add_argument("--dry", action="store_true", help="small models, on the CPU unless --device names another")
    parser.add_argument("--json", type=Path, default=Path("first_hour.json"), metavar="FILE", help="%(default)s")
    asked = parser.parse_args(arguments)
    try:
        place = find_place(asked.device, asked.dry)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    written: dict[str, Any] = {"form": 1, "session": describe_session() | _machine(), "place": place._asdict()}
    written["parts"] = {}
    print(", ".join(f"{name} {value}" for name, value in written["session"].items()), flush=True)
    for name in asked.part or PARTS:
        print(f"{name}, {PARTS[name].limit / 60:.0f} min at most: {PARTS[name].text}", flush=True)
        written["parts"][name] = result_of(PARTS[name], place)
        asked.json.write_text(json.dumps(written, indent=1))
    print(f"{asked.json} has the results, and the text of errors with names of folders: read it before you send it")
    print(f"| {' | '.join(row_of(written))} |")
    if any(part["result"] in (FAILED, HUNG) for part in written["parts"].values()):
        sys.exit(1)


def result_of(part: Part, place: Place) -> dict[str, Any]:
    """Run a part; return its result, its seconds and those of each case."""
    began = time.monotonic()
    starts, cases = part.starts(place), []
    for start in starts:
        for case in start.results(place, began + part.limit):
            cases.append(case)
            error = case.get("error", "").strip().rpartition("\n")[2]
            print(f"  {case['result']:<15}{case['name']}  {error[:300]}".rstrip(), flush=True)
    counts = Counter(case["result"] for case in cases)
    order = (FAILED, HUNG, NOT_RUN, NOTHING, PASSED)
    worst = next(filter(counts.__getitem__, order)) if counts else ABSENT
    seconds = time.monotonic() - began
    told = ", ".join(f"{number} {result}" for result, number in counts.items())
    print(f"  {seconds:.0f} s: {told or ABSENT}", flush=True)
    return {"result": worst, "seconds": round(seconds, 1), "limit": part.limit, "cases": cases}


def row_of(written: dict[str, Any]) -> list[str]:
    """Return the cells of a machine for ``COLUMNS``."""
    session, parts = written["session"], written["parts"]
    cells = [session.get("gpus") or f"{written['place']['device']} on {session['processor']}"]
    cells.append(f"{session['torch']}, {session['commit']}")
    for name in PARTS:
        results = [case["result"] for case in parts.get(name, {}).get("cases", ())]
        cells.append(f"{results.count(PASSED)} of {len(results)}" if results else ABSENT if name in parts else "")
    times = []
    for case in parts.get("speed", {}).get("cases", ()):
        ranks = case.get("figures", [{}])
        times += [f"{name} {1e3 * max(rank[name]['seconds'] for rank in ranks):,.0f}" for name in ranks[0]]
    return [*cells, ", ".join(times)]


def _machine() -> dict[str, str]:
    """Return the system and, where NVIDIA's tool is, each GPU with its driver and memory."""
    found = {"system": platform.platform()}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False)
        found["gpus"] = "; ".join(listed.stdout.strip().splitlines())
    return found


if __name__ == "__main__":
    main()
