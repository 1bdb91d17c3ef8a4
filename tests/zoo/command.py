"""A command that judges every model type, each in a process of its own, and prints a line for each."""

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
import transformers
from rich.console import Console

from tests.zoo.own_process import in_own_processes
from tests.zoo.special_cases import CANNOT_TRAIN
from tests.zoo.tiny_models import TASKS, types

TIME_LIMIT = 120.0  # seconds a type

# Of a task and a type: what kind of result it has ("WRONG" among them), and why in words.
Judge = Callable[[str, str], tuple[str, str]]


def judge_every_type(judge: Judge, description: str) -> None:
    """Print one line a type, and a summary of each task; ends the process, with 1 where one is WRONG.

    What ``judge`` raises is WRONG, too.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="by default all", metavar="TASK")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--type", help="only this one")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    wrong = False
    for task in arguments.tasks or list(TASKS):
        chosen = [name for name in types(task) if arguments.type in (None, name)]
        counts: dict[str, int] = {}
        for name, result in in_own_processes(partial(_judge, judge, task), chosen, arguments.jobs, TIME_LIMIT):
            kind, words = ("WRONG", str(result)) if isinstance(result, RuntimeError) else result
            counts[kind] = counts.get(kind, 0) + 1
            console.print(f"{task:21}{name:28}{kind:20}{words:.300}", markup=False)
        console.print(f"{task}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
        wrong = wrong or "WRONG" in counts
    sys.exit(wrong)


def _judge(judge: Judge, task: str, model_type: str) -> tuple[str, str]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if (task, model_type) in CANNOT_TRAIN:
        return "does not build", CANNOT_TRAIN[task, model_type]
    try:
        return judge(task, model_type)
    except Exception as error:
        return "WRONG", f"{type(error).__name__}: {error}"
