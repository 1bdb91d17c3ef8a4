"""Every transformer type: traced, cut in two and in four, trained, and compared with the unwrapped model.

    python -m tests.zoo.training [TASK ...] [--jobs 2] [--type TYPE] [--output docs/zoo.md]

For each type of transformers' causal-LM, masked-LM, sequence-to-sequence and image-classification mappings, a tiny
model with random weights is traced on the meta device, then cut into two and into four stages that run in one
process, in train and in eval mode, on three shapes, one of them padded. Loss and every gradient are compared. A
type is

- exact: equal to the last bit, but for the gradient of a tied weight, a sum in another order;
- to rounding: every gradient's difference is below 1e-5 of its own greatest value (of a thousandth of the model's,
  where it is smaller than that: the gradient of an attention's key bias is zero but for rounding);
- refused: with a message of ours that names the construct, its file and line;
- failing: with another error, which is not yet the clear refusal that it should be;
- wrong: anything else.

There must be none that is failing or wrong: the exit status is then 1.
"""

import argparse
import copy
import os
import re
import sys
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import transformers.models.auto.modeling_auto
from rich.console import Console

from nxdpp.pipeline.microbatch import split_inputs
from nxdpp.tracing.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance
from tests.zoo import (
    ARGUMENTS,
    CANNOT_TRAIN,
    NO_GRADIENT_IN_EVAL,
    NOTES,
    SHAPES,
    TASKS,
    build,
    inputs,
    types,
)
from tests.zoo.own_process import in_own_processes

TIME_LIMIT = 120.0  # seconds a type
MICROBATCHES = 4
ROUNDING = 1e-5


class Verdict(NamedTuple):
    """What came of a type: ``kind`` and, in words, how much it differs, what crosses, or why it is refused."""

    kind: str
    crossing: str
    words: str


def main() -> None:
    """Print one line a type, then write the page."""
    arguments = _arguments()
    verdicts: dict[str, dict[str, Verdict]] = {}
    console = Console(highlight=False, soft_wrap=True)
    for task in arguments.tasks or list(TASKS):
        chosen = [name for name in types(task) if arguments.type in (None, name)]
        verdicts[task] = {}
        for name, result in in_own_processes(partial(judge, task), chosen, arguments.jobs, TIME_LIMIT):
            verdict = Verdict("failing", "", str(result)) if isinstance(result, RuntimeError) else result
            verdicts[task][name] = verdict
            console.print(f"{task:21}{name:28}{verdict.kind:13}{verdict.crossing:14}{verdict.words:.200}", markup=False)
        console.print(_summary(task, verdicts[task]))
    if arguments.output:
        arguments.output.write_text(_page(verdicts))
    if any(verdict.kind in ("failing", "WRONG") for found in verdicts.values() for verdict in found.values()):
        sys.exit(1)


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type with its unwrapped self. Runs in a process of its own."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if (task, model_type) in CANNOT_TRAIN:
        return Verdict("does not build", "", CANNOT_TRAIN[task, model_type])
    model = build(task, model_type)
    whole = _without_cache(copy.deepcopy(model))
    worst, crossing = 0.0, ""
    given: dict[str, Any] = ARGUMENTS.get(model_type, {})
    for stages in (2, 4):
        try:
            InProcessPipeline(build(task, model_type, "meta"), stages, **given)
            pipeline = InProcessPipeline(model, stages, **given)
            for training in (True, False):
                model.train(training)
                whole.train(training)
                for shape in range(len(SHAPES)):
                    with torch.set_grad_enabled(training or model_type not in NO_GRADIENT_IN_EVAL):
                        off = distance(pipeline, model, whole, inputs(task, model, shape), MICROBATCHES)
                    worst = max(worst, off)
            crossing = _crossing(pipeline, inputs(task, model, 0))
        except Exception as error:
            kind = "refused" if is_refusal(error) else "failing"
            return Verdict(kind, "", f"{stages} stages: {type(error).__name__}: {error}")
    how = [NOTES[model_type]] if model_type in NOTES else []
    how += [f"{name}={value}" for name, value in given.items()]
    if worst == 0:
        return Verdict("exact", crossing, "; ".join(how))
    return Verdict("to rounding" if worst < ROUNDING else "WRONG", crossing, "; ".join([f"{worst:.1e}", *how]))


def _crossing(pipeline: InProcessPipeline, batch: dict[str, torch.Tensor]) -> str:
    _, plans = pipeline.loss_plans(split_inputs(batch, MICROBATCHES)[0])
    return " ".join(str(len(plan.received)) for plan in plans[1:])


def is_refusal(error: Exception) -> bool:
    """Whether ``error`` is a sentence of ours that names a file and a line, and no mishap."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = type(error) in (TracingError, ValueError, RuntimeError) and f"{os.sep}nxdpp{os.sep}" in raised_in
    return is_ours and re.search(r"\.py:\d+", str(error)) is not None


def _without_cache(model: Any) -> Any:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    return model


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.training", description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument("--type", help="this model type only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the page")
    arguments = parser.parse_args()
    unknown = set(arguments.tasks) - set(TASKS)
    if unknown:
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    return arguments


def _summary(task: str, verdicts: dict[str, Verdict]) -> str:
    counts = Counter(verdict.kind for verdict in verdicts.values())
    built = len(verdicts) - counts["does not build"]
    right = counts["exact"] + counts["to rounding"]
    share = 100 * right / built if built else 0.0
    told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"{task}: {share:.1f} % of the {built} types that build are right ({told})"


def _page(verdicts: dict[str, dict[str, Verdict]]) -> str:
    lines = [
        "# Which transformers can be cut",
        "",
        f"Written by `python -m tests.zoo.training --output docs/zoo.md`, transformers {transformers.__version__}, "
        f"torch {torch.__version__.partition('+')[0]}.",
        "Each type of four auto mappings, as small as it can be built, cut into two and four stages, in train and eval",
        "mode, on three shapes, one of them padded. *Exact*: loss, every gradient and every buffer equal to the last",
        "bit, but for a tied weight's gradient, a sum in another order. *Refused*: with a sentence that names the",
        "construct, its file and line. *Crosses*: how many values each of four stages receives. The last column of a",
        "type that is right has the arguments of `NxDPPModel` that it needs and what is special about it.",
        "",
        *(f"- {_summary(task, found)}" for task, found in verdicts.items()),
    ]
    for task, found in verdicts.items():
        lines += ["", f"## {task}", "", "| type | | crosses | |", "|---|---|---|---|"]
        for name, (kind, crossing, words) in sorted(found.items()):
            lines.append(f"| {name} | {kind} | {crossing} | {_one_line(words)} |")
    return "\n".join(lines) + "\n"


def _one_line(words: str) -> str:
    site_packages = str(Path(transformers.__file__).parents[1])
    return " ".join(words.replace(site_packages + "/", "").replace("|", "\\|").split())[:1000]


if __name__ == "__main__":
    main()
