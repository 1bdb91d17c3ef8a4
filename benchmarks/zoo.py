"""Every transformer type: traced, cut in two and in four, trained, and compared with the unwrapped model.

    python -m benchmarks.zoo [TASK ...] [--jobs 2] [--type TYPE] [--output docs/zoo.md]

For each type of transformers' causal-LM, masked-LM, sequence-to-sequence and image-classification mappings, a tiny
model with random weights is traced on the meta device, then cut into two and into four stages that run in one
process, in train and in eval mode, on three shapes, one of them padded. Loss and every gradient are compared. A
type is

- exact: equal to the last bit, but for the gradient of a tied weight, a sum in another order;
- to rounding: every gradient's difference is below 1e-5 of its own greatest value (of a thousandth of the model's,
  where it is smaller than that: the gradient of an attention's key bias is zero but for rounding);
- refused: with a message of ours;
- failing: with another error, which is not yet the clear refusal that it should be;
- wrong: anything else. There must be none.
"""

import argparse
import copy
import os
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

from benchmarks.in_process import LocalPipeline
from benchmarks.zoo_models import CANNOT_TRAIN, SHAPES, TASKS, build, inputs, types
from benchmarks.zoo_models.own_process import in_own_processes

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
    for stages in (2, 4):
        try:
            LocalPipeline(build(task, model_type, "meta"), stages)
            pipeline = LocalPipeline(model, stages)
            for training in (True, False):
                model.train(training)
                whole.train(training)
                for shape in range(len(SHAPES)):
                    worst = max(worst, _distance(pipeline, model, whole, inputs(task, model, shape)))
            _, plans = pipeline.plans(inputs(task, model, 0))
        except Exception as error:
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            kind = "refused" if f"{os.sep}nxdpp{os.sep}" in raised_in else "failing"
            return Verdict(kind, "", f"{stages} stages: {type(error).__name__}: {error}")
        crossing = " ".join(str(len(plan.received)) for plan in plans[1:])
    if worst == 0:
        return Verdict("exact", crossing, "")
    return Verdict("to rounding" if worst < ROUNDING else "WRONG", crossing, f"{worst:.1e}")


def _distance(pipeline: LocalPipeline, model: Any, whole: Any, batch: dict[str, torch.Tensor]) -> float:
    """0 where every number is equal, otherwise the greatest difference."""
    model.zero_grad()
    whole.zero_grad()
    ours = pipeline.train(batch, MICROBATCHES)
    theirs = []
    for part in _microbatches(batch):
        loss = whole(**part).loss
        (loss / MICROBATCHES).backward()
        theirs.append(loss.detach())
    differences = [abs(a - b).item() / max(abs(b).item(), 1e-6) for a, b in zip(ours, theirs, strict=True)]
    return float(max(*differences, *_gradient_distances(model, whole)))


def _gradient_distances(model: Any, whole: Any) -> list[float]:
    names = Counter(id(parameter) for _, parameter in whole.named_parameters(remove_duplicate=False))
    gradients = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
    scale = max(gradient.abs().max().item() for gradient in gradients)
    distances = []
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        a = torch.zeros_like(ours) if ours.grad is None else ours.grad
        b = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        own_scale = max(b.abs().max().item(), scale / 1000)
        distance = 0.0 if torch.equal(a, b) else (a - b).abs().max().item() / own_scale
        is_tied = names[id(theirs)] > 1
        distances.append(0.0 if is_tied and distance < ROUNDING else distance)
    return distances


def _microbatches(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    rows = max(value.size(0) for value in batch.values())
    split = {n: v.chunk(MICROBATCHES) if v.size(0) == rows else (v,) * MICROBATCHES for n, v in batch.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(MICROBATCHES)]


def _without_cache(model: Any) -> Any:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    return model


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
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
        f"Written by `python -m benchmarks.zoo --output docs/zoo.md`, transformers {transformers.__version__}, torch "
        f"{torch.__version__.partition('+')[0]}.",
        "Each type of four auto mappings, as small as it can be built, cut into two and four stages, in train and eval",
        "mode, on three shapes, one of them padded. *Exact*: loss and every gradient equal to the last bit, but for a",
        "tied weight's gradient, a sum in another order. *Refused*: with a sentence of ours. *Failing*: with another",
        "error, still to be made a clear refusal. *Crosses*: how many values each of four stages receives.",
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
    return " ".join(words.replace(site_packages + "/", "").replace("|", "\\|").split())[:400]


if __name__ == "__main__":
    main()
