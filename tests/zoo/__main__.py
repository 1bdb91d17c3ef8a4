"""Compare every transformer type, cut into stages, with its unwrapped model.

python -m tests.zoo SWEEP [TASK ...] [--type TYPE] [--jobs 2] [--output FILE]
"""

import argparse
import sys
from pathlib import Path

from tests.zoo import initial_values, pretrained, training
from tests.zoo.page import page
from tests.zoo.sweep import WRONG, Judge, judge_types, types_of
from tests.zoo.tiny_models import TASKS

SWEEPS: dict[str, Judge] = {
    "training": training.judge,
    "initial-values": initial_values.judge,
    "pretrained": pretrained.judge,
}


def main() -> None:
    """Print one line for each type and a summary for each task. The exit status is 1 if a type is failing or WRONG."""
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - set(TASKS):
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    if arguments.output and arguments.sweep != "training":
        parser.error("--output is for the training sweep")
    verdicts = {
        task: judge_types(SWEEPS[arguments.sweep], task, types_of(task, arguments.type), arguments.jobs)
        for task in arguments.tasks or TASKS
    }
    if arguments.output:
        arguments.output.write_text(page(verdicts))
    sys.exit(any(verdict.result in WRONG for found in verdicts.values() for verdict in found.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", choices=SWEEPS, help="comparison")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument("--type", help="this model type only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page of the training sweep here")
    return parser


if __name__ == "__main__":
    main()
