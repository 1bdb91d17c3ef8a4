"""Compare every type of transformers and models of other libraries, cut into stages, with one process.

python -m tests.zoo SWEEP [TASK ...] [--type TYPE] [--jobs 2] [--journal FILE] [--output FILE]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.zoo import TASKS, initial_values, libraries_sweep, pretrained, tensor, training, types, xla
from tests.zoo.libraries import LIBRARIES, cases, is_installed
from tests.zoo.page import page, section_of
from tests.zoo.sweep import WRONG, Journal, Judge, Verdict, judge_types
from tests.zoo.xla_page import TITLE, with_xla_section

SWEEPS: dict[str, Judge] = {
    "training": training.judge,
    "initial-values": initial_values.judge,
    "pretrained": pretrained.judge,
    "tensor": tensor.judge,
    "xla": xla.judge,
}


def main() -> None:
    """Print one line for each type and a summary for each task. The exit status is 1 if a type is failing or WRONG."""
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - {*TASKS, *LIBRARIES}:
        parser.error(f"no such task or library: {', '.join(sorted(unknown))}")
    if arguments.output and arguments.sweep not in ("training", "xla"):
        parser.error("--output is for the sweeps training and xla")
    verdicts = {name: _swept(arguments, name) for name in arguments.tasks or _by_default(arguments.sweep)}
    if arguments.output:
        _write(arguments.output, arguments.sweep, verdicts)
    sys.exit(any(verdict.result in WRONG for found in verdicts.values() for verdict in found.values()))


def _write(path: Path, sweep: str, verdicts: dict[str, dict[str, Verdict]]) -> None:
    """Write the page, or the section of the XLA sweep; the other part stays as it is."""
    present = path.read_text() if path.exists() else ""
    if sweep == "xla":
        path.write_text(with_xla_section(present, verdicts, _commit()))
    else:
        path.write_text(page(verdicts, _commit()) + section_of(present, TITLE))


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _by_default(sweep: str) -> list[str]:
    if sweep == "xla":
        return ["causal-lm"]
    if sweep != "training":
        return [name for name, task in TASKS.items() if task.thorough]
    return [*TASKS, *(name for name in LIBRARIES if is_installed(name))]


def _swept(arguments: argparse.Namespace, name: str) -> dict[str, Verdict]:
    is_task = name in TASKS
    judge = SWEEPS[arguments.sweep] if is_task else libraries_sweep.judge
    known = types(name) if is_task else list(cases(name))
    chosen = [one for one in known if arguments.type in (None, one)]
    return judge_types(judge, name, chosen, arguments.jobs, Journal(arguments.journal) if arguments.journal else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", choices=SWEEPS, help="comparison")
    known = ", ".join([*TASKS, *LIBRARIES])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"task or library, of {known}; all by default")
    parser.add_argument("--type", help="this model type only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page of the sweep training or xla here")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep verdicts here, and go on from those in it")
    return parser


if __name__ == "__main__":
    main()
