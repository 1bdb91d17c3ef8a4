"""Draw training scripts at random, and compare each over ranks with one process.

python -m tools.loops [--seeds 2000] [--first 0] [--jobs 2] [--show SEED] [--shrink SEED]
"""

import argparse
import os
import sys
from collections import Counter, defaultdict

from tools.loops.draw import Script, draw
from tools.loops.run import Outcome, outcomes
from tools.loops.shrink import shrunk

_BAD = ("different", "ended")


def main() -> None:
    """Print silent differences with their scripts, refusals by reason, and what was equal; exit with 1 for one.

    Many refusals of one action would say that nothing compares it: each has the number of its equal scripts.
    """
    arguments = _parser().parse_args()
    # As in tests/conftest.py: torch looks up the name of every address that connects.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    if arguments.show is not None:
        print(draw(arguments.show))
        return
    if arguments.shrink is not None:
        _print(*shrunk(draw(arguments.shrink)))
        return
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    counts: Counter[str] = Counter()
    refused = defaultdict(list)
    having: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    for script, outcome in outcomes([draw(seed) for seed in seeds], arguments.jobs):
        counts[outcome.kind] += 1
        having.update(script.subjects)
        equal.update(script.subjects if outcome.kind == "equal" else ())
        if outcome.kind in _BAD:
            _print(script, outcome)
        elif outcome.kind != "equal":
            refused[f"{outcome.kind}: {outcome.short}"].append(script.seed)
    for reason, found in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"{len(found)} {reason}\n    seeds {', '.join(map(str, found))}")
    for subject, number in having.most_common():
        print(f"{subject}: {number:,} of the scripts, equal: {equal[subject]:,}")
    print(", ".join(f"{counts[kind]} {kind}" for kind in counts))
    sys.exit(any(counts[kind] for kind in _BAD))


def _print(script: Script, outcome: Outcome) -> None:
    print(f"{outcome.kind} {script.seed}: {outcome.reason}\n{script}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.loops", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100, help="number of scripts")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="starts of ranks at a time")
    parser.add_argument("--show", type=int, metavar="SEED", help="only print the script")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="leave actions out while the result stays")
    return parser


if __name__ == "__main__":
    main()
