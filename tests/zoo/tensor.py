"""Tensor sweep: each type with a plan, divided over two tensor-parallel ranks, against one process.

Each rank trains the model by its own ``tp_plan``, and the whole model, on two shapes, one of them padded. The loss and
this rank's part of each gradient are compared. A type is

- to rounding: each difference is below 1e-5 of the gradient's greatest value. A model that amplifies rounding more may
  differ by twice the difference between float32 and float64 in one process;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else;
- no plan: neither its configuration nor nxdpp has a plan.
"""

from functools import partial
from typing import Any

import torch

from nxdpp import parallel_state
from nxdpp.initialization.parts import own_part
from nxdpp.parallel_layers.sequence_parallel import allreduce_sequence_parallel_gradients
from nxdpp.tensor_parallel.own_plans import plan_of
from nxdpp.tensor_parallel.parallelize import parallelize
from tests.support.forked_ranks import forked_ranks
from tests.support.training_distance import relative
from tests.zoo import build, inputs
from tests.zoo.comparison import ROUNDING, is_refusal, without_cache, without_randomness
from tests.zoo.sweep import Verdict

RANKS = 2
_SHAPES = (0, 1)


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type over two ranks with one process."""
    bare: Any = build(task, model_type, "meta")
    if not plan_of(bare):
        return Verdict("no plan")
    found = forked_ranks(RANKS, partial(rank_verdict, task, model_type))
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        # The other rank loses its connection.
        error = min(errors, key=lambda each: "Connection closed" in str(each))
        return Verdict("failing", f"{type(error).__name__}: {error}")
    verdicts: list[Verdict] = found
    return max(
        verdicts, key=lambda verdict: ("exact", "to rounding", "refused", "failing", "WRONG").index(verdict.result)
    )


def rank_verdict(task: str, model_type: str, rank: int) -> Verdict:
    """Verdict of one of the ranks, in a process of its own."""
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    try:
        model: Any = build(task, model_type)
        parallelize(model, plan_of(model), parallel_loss=True)
        worst, where = distance(task, model, build(task, model_type))
        words, is_right = f"{worst:.1e}", worst < ROUNDING
        if not is_right and worst < 10 * ROUNDING:
            of_one, _ = distance(task, build(task, model_type), _in_float64(task, model_type))
            words, is_right = f"{words} (float32 from float64 in one process: {of_one:.1e})", worst < 2 * of_one
    except Exception as error:
        result = "refused" if is_refusal(error) else "failing"
        if result == "refused":
            return Verdict(result, f"{type(error).__name__}: {error}")
        raise
    divided = sum(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters())
    words = f"{type(model).__name__}: {words} at {where}, {divided} parameters divided"
    return Verdict("to rounding" if is_right else "WRONG", words)


def _in_float64(task: str, model_type: str) -> Any:
    model: Any = build(task, model_type)
    for module in model.modules():
        if hasattr(module, "config"):
            # torch's grouped products take no float64.
            module.config._experts_implementation = "eager"
    return torch.nn.Module.to(model, dtype=torch.float64)


def distance(task: str, model: Any, whole: Any) -> tuple[float, str]:
    """Greatest difference of loss and gradients on this rank, and the name of its parameter."""
    for each in (model, whole):
        without_randomness(each)
        without_cache(each)
    worst = (0.0, "")
    for shape in _SHAPES:
        batch = inputs(task, whole, shape)
        model.zero_grad()
        whole.zero_grad()
        ours, theirs = model(**batch).loss, whole(**batch).loss
        ours.backward()
        theirs.backward()
        allreduce_sequence_parallel_gradients(model.parameters())
        worst = max(worst, (relative(ours.detach(), theirs.detach(), 1e-6), "loss"))
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
        least = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()) / 1000
        for name, parameter in model.named_parameters():
            theirs = gradients.get(name, torch.zeros(()).expand(whole.get_parameter(name).shape))
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = own_part(theirs, parameter)
            # The scale is that of the whole gradient.
            scale = max(least, float(theirs.abs().max()) if theirs.numel() else 0.0)
            worst = max(worst, (relative(mine, expected, scale), name))
    return worst
