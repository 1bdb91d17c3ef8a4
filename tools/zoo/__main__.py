"""Compare every type of transformers and models of other libraries, cut into stages, with one process.

python -m tools.zoo SWEEP [TASK ...] [--type TYPE] [--jobs 2] [--journal FILE] [--write]
"""

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tools.zoo import (
    TASKS,
    compiled,
    context,
    experts,
    generation,
    host_waits,
    initial_values,
    layer_classes,
    libraries_sweep,
    mixed_rows,
    pretrained,
    shards,
    tensor,
    training,
    types,
    xla,
)
from tools.zoo.libraries import DISTRIBUTIONS, LIBRARIES, cases, is_installed
from tools.zoo.page import page
from tools.zoo.results import FOLDER, read, write
from tools.zoo.sweep import TIME_LIMIT, WRONG, Journal, Judge, Verdict, judge_types

SWEEPS: dict[str, Judge] = {
    "training": training.judge,
    "initial-values": initial_values.judge,
    "pretrained": pretrained.judge,
    "tensor": tensor.judge,
    "xla": xla.judge,
    "compiled": compiled.judge,
    "generation": generation.judge,
    "shards": shards.judge,
    "experts": experts.judge,
    "mixed-rows": mixed_rows.judge,
    "layer-classes": layer_classes.judge,
    "host-waits": host_waits.judge,
    "context": context.judge,
}
_WRITTEN = ("training", "xla", "compiled", "generation", "shards", "experts", "mixed-rows", "layer-classes")
"""Sweeps whose rows are kept in files."""

_TIME_LIMITS = {
    "compiled": compiled.TIME_LIMIT,
    "layer-classes": layer_classes.TIME_LIMIT,
    "experts": experts.TIME_LIMIT,
}

_PAGE = Path(__file__).parents[2] / "docs/zoo.md"


def main() -> None:
    """Print one line for each type and a summary for each task. The exit status is 1 if a type is failing or WRONG."""
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - {*TASKS, *LIBRARIES}:
        parser.error(f"no such task or library: {', '.join(sorted(unknown))}")
    if arguments.write and arguments.sweep not in _WRITTEN:
        parser.error(f"--write is for the sweeps {', '.join(_WRITTEN)}")
    verdicts = {name: _swept(arguments, name) for name in arguments.tasks or _by_default(arguments.sweep)}
    if arguments.write:
        _write(arguments.sweep, verdicts, whole=arguments.type is None)
    sys.exit(any(verdict.result in WRONG for found in verdicts.values() for verdict in found.values()))


def _write(sweep: str, verdicts: dict[str, dict[str, Verdict]], whole: bool) -> None:
    """Write the rows of the sweep, and the page; without ``whole`` types that were not judged keep their rows."""
    file = FOLDER / f"{sweep}.tsv"
    write(file, read(file).merged(_source(), verdicts, whole))
    _PAGE.write_text(page({name: read(FOLDER / f"{name}.tsv") for name in _WRITTEN}), encoding="utf-8")


def _source() -> str:
    """Return the commit and the versions of torch and of the libraries."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    words = [f"commit {commit}"]
    for distribution in ("torch", "torch_xla", "transformers", *DISTRIBUTIONS.values()):
        try:
            words.append(f"{distribution} {metadata.version(distribution).partition('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(words)


def _by_default(sweep: str) -> list[str]:
    if sweep == "generation":
        return list(generation.GENERATING)
    if sweep == "mixed-rows":
        return ["image-text-to-text"]
    if sweep == "layer-classes":
        return list(layer_classes.TYPES)
    if sweep == "experts":
        return list(experts.MIXTURES)
    if sweep in ("xla", "compiled", "shards"):
        return ["causal-lm"]
    if sweep != "training":
        return [name for name, task in TASKS.items() if task.thorough]
    return [*TASKS, *(name for name in LIBRARIES if is_installed(name))]


def _swept(arguments: argparse.Namespace, name: str) -> dict[str, Verdict]:
    is_task = name in TASKS
    judge = SWEEPS[arguments.sweep] if is_task else libraries_sweep.judge
    known = types(name) if is_task else list(cases(name))
    if arguments.sweep == "layer-classes" and arguments.type is None:
        known = list(layer_classes.TYPES.get(name, known))
    if arguments.sweep == "experts":
        known = experts.mixtures(name)
    chosen = [one for one in known if arguments.type in (None, one)]
    journal = Journal(arguments.journal) if arguments.journal else None
    limit = _TIME_LIMITS.get(arguments.sweep, TIME_LIMIT)
    return judge_types(judge, name, chosen, arguments.jobs, journal, limit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", choices=SWEEPS, help="comparison")
    known = ", ".join([*TASKS, *LIBRARIES])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"task or library, of {known}; all by default")
    parser.add_argument("--type", help="this model type only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--write", action="store_true", help="write tools/zoo/results/SWEEP.tsv and docs/zoo.md")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep verdicts here, and resume after those")
    return parser


if __name__ == "__main__":
    main()
