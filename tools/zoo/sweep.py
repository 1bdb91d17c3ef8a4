"""Judge every model type of a task, each in a separate process."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
import transformers.models.auto.modeling_auto  # once, before the processes are forked
from rich.console import Console

from tools.zoo.own_process import in_own_processes
from tools.zoo.special_cases import CANNOT_TRAIN

TIME_LIMIT = 300.0  # seconds for a type; the slowest takes 20 on a free core
RIGHT = ("exact", "to rounding", "no waits")
WRONG = ("failing", "WRONG")
APART = ("does not build", "XLA's own")  # not counted among the types of which a share is right


class Verdict(NamedTuple):
    """Result of a type with an explanation; ``received`` has the number of values that each stage receives."""

    result: str
    words: str = ""
    received: str = ""


class Journal:
    """Verdicts in a file, one a line, so that a sweep that ended early goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def verdicts(self, task: str) -> dict[str, Verdict]:
        """The verdicts of ``task``, by type; the last one of a type."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        entries = [json.loads(line) for line in lines]
        return {name: Verdict(*verdict) for known, name, verdict in entries if known == task}

    def add(self, task: str, name: str, verdict: Verdict) -> None:
        """Append the verdict of a type."""
        with self._path.open("a") as file:
            file.write(json.dumps([task, name, verdict]) + "\n")


# Takes a task and a type.
Judge = Callable[[str, str], Verdict]


def judge_types(
    judge: Judge,
    task: str,
    chosen: Sequence[str],
    jobs: int,
    journal: Journal | None = None,
    time_limit: float = TIME_LIMIT,
) -> dict[str, Verdict]:
    """Print one line for each type, then a summary. ``judge`` runs in ``jobs`` processes at a time.

    A type that takes more than ``time_limit`` seconds, or whose process is killed, is failing. Types that ``journal``
    has are not judged again; the verdicts of the others are added to it.
    """
    console = Console(highlight=False, soft_wrap=True)
    known = {} if journal is None else journal.verdicts(task)
    verdicts = {name: known[name] for name in chosen if name in known}
    left = [name for name in chosen if name not in known]
    for name, result in in_own_processes(partial(judge_quietly, judge, task), left, jobs, time_limit):
        verdict = Verdict("failing", str(result)) if isinstance(result, RuntimeError) else result
        verdicts[name] = verdict
        if journal is not None:
            journal.add(task, name, verdict)
        line = f"{task:31}{name:38}{verdict.result:16}{verdict.received:14}{verdict.words:.300}"
        console.print(line, markup=False)
    console.print(summary(task, verdicts))
    return verdicts


def judge_quietly(judge: Judge, task: str, model_type: str) -> Verdict:
    """Judge one type without warnings. An error that ``judge`` raises is WRONG."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if (task, model_type) in CANNOT_TRAIN:
        return Verdict("does not build", CANNOT_TRAIN[task, model_type])
    try:
        return judge(task, model_type)
    except Exception as error:
        return Verdict("WRONG", f"{type(error).__name__}: {error}")


def summary(task: str, verdicts: dict[str, Verdict]) -> str:
    """The share of right types, and the number of types with each result."""
    counts = Counter(verdict.result for verdict in verdicts.values())
    built = len(verdicts) - sum(counts[result] for result in APART)
    right = sum(counts[result] for result in RIGHT)
    share = 100 * right / built if built else 0.0
    told = ", ".join(f"{count} {result}" for result, count in counts.most_common())
    return f"{task}: {share:.1f} % of the {built} types that build are right ({told})"
