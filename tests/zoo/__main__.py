"""Build every type, train it on every shape, and say what works.

python -m tests.zoo [TASK] [--type TYPE] [--jobs 2] [--traceback]
"""

import argparse
import math
import time
import traceback
import warnings
from functools import partial
from typing import Any

import torch
import transformers.models.auto.modeling_auto  # noqa: F401  imported once, before the processes are forked
from transformers import PreTrainedModel, logging

from tests.zoo import SHAPES, TASKS, build, inputs, types
from tests.zoo.own_process import in_own_processes
from tests.zoo.special_cases import CANNOT_TRAIN

TIME_LIMIT = 40.0  # seconds a type

Result = dict[str, Any]


def main() -> None:
    """Print one line a type and the totals of each task."""
    arguments = _arguments()
    for task in [arguments.task] if arguments.task else list(TASKS):
        chosen = [arguments.type] if arguments.type else types(task)
        results = _run_all(task, chosen, arguments.jobs, arguments.traceback)
        built = sum(result["parameters"] is not None for result in results)
        run = sum(result["failure"] is None for result in results)
        print(f"{task}: {len(chosen)} types, {built} build, {run} run\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("task", nargs="?", choices=sorted(TASKS))
    parser.add_argument("--type", help="this model type only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--traceback", action="store_true", help="print where a type fails")
    return parser.parse_args()


def _run_all(task: str, chosen: list[str], jobs: int, with_traceback: bool) -> list[Result]:
    results = []
    for model_type, received in in_own_processes(partial(_try_type, task), chosen, jobs, TIME_LIMIT):
        result = _failed(str(received)) if isinstance(received, RuntimeError) else received
        result["note"] = CANNOT_TRAIN.get((task, model_type), result["note"])
        _show(model_type, result, with_traceback)
        results.append(result)
    return results


def _failed(failure: str) -> Result:
    return {"parameters": None, "losses": [], "seconds": TIME_LIMIT, "failure": failure, "traceback": "", "note": ""}


def _try_type(task: str, model_type: str) -> Result:
    """Build the type and train it on each shape; what came of it. Runs in a process of its own."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    started = time.monotonic()
    result = _failed("") | {"failure": None}
    try:
        model = build(task, model_type)
        result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        for shape_index in range(len(SHAPES)):
            result["losses"].append(_train(task, model, shape_index))
        if _train(task, model, 0) != result["losses"][0]:
            result["note"] = "draws at random in training"
    except Exception as error:
        result["failure"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
        result["traceback"] = traceback.format_exc()
    result["seconds"] = time.monotonic() - started
    return result


def _train(task: str, model: PreTrainedModel, shape_index: int) -> float:
    """The loss of one forward and backward; RuntimeError unless it is finite and reaches some parameter."""
    model.zero_grad()
    loss = model(**inputs(task, model, shape_index)).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not math.isfinite(loss.item()) or not all(gradient.isfinite().all() for gradient in gradients):
        raise RuntimeError(f"shape {shape_index}: the loss is {loss.item()} or a gradient is not finite")
    if not any(gradient.any() for gradient in gradients):
        raise RuntimeError(f"shape {shape_index}: every gradient is zero")
    return float(loss.item())


def _show(model_type: str, result: Result, with_traceback: bool) -> None:
    parameters = "-" if result["parameters"] is None else f"{result['parameters']:,}"
    reason = result["note"] or result["failure"] or ""
    losses = " ".join(f"{loss:.4f}" for loss in result["losses"])
    print(f"{model_type:28}{parameters:>12}  {losses}  {result['seconds']:.1f} s  {reason}", flush=True)
    if with_traceback and result["traceback"]:
        print(result["traceback"], flush=True)


if __name__ == "__main__":
    main()
