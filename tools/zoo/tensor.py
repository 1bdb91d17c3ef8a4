"""Tensor sweep: each type with a plan, divided over two tensor-parallel ranks, against one process.

Each rank trains the model by its own ``tp_plan``, and the whole model, on two shapes, one of them padded. The loss and
this rank's part of each gradient are compared, as a share of the gradient's greatest value. Float64 throughout tells
errors from rounding: equal computations differ by 1e-14. A type is

- to rounding: the difference is below 1e-9 in float64. In float32 it is below 1e-5, or below twice the one between
  float32 and float64 in one process, for models that amplify rounding.
  Types whose layers allow it are compared under sequence parallelism in float64, too;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else;
- no plan: neither its configuration nor nxdpp has a plan.
"""

from functools import partial
from typing import Any

import torch

from nxdpp import parallel_state
from nxdpp.tensor.models.comparison import EQUAL, difference, to_float64
from nxdpp.tensor.models.own_plans import plan_of
from nxdpp.tensor.models.parallelize import parallelize
from nxdpp.tensor.models.sequence import check_layers
from tests.support.forked_ranks import forked_ranks
from tools.zoo import build, inputs
from tools.zoo.comparison import ROUNDING, is_refusal, without_cache, without_randomness
from tools.zoo.sweep import Verdict

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
        exact_model, whole = _divided(task, model_type, True), _whole(task, model_type, True)
        exact, where = _distance(task, exact_model, whole)
        model = _divided(task, model_type, False)
        rounded, _ = _distance(task, model, _whole(task, model_type, False))
        words, is_right = f"float64 {exact:.1e} at {where}, float32 {rounded:.1e}", exact < EQUAL
        if rounded >= ROUNDING:
            of_one, _ = _distance(task, _whole(task, model_type, False), whole)
            words, is_right = f"{words} (one process from float64: {of_one:.1e})", is_right and rounded < 2 * of_one
        if (divided_sequence := _distance_of_sequence(task, model_type, whole)) is not None:
            words = f"{words}, sequence parallel {divided_sequence:.1e}"
            is_right = is_right and divided_sequence < EQUAL
    except Exception as error:
        if is_refusal(error):
            return Verdict("refused", f"{type(error).__name__}: {error}")
        raise
    divided = sum(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters())
    words = f"{type(model).__name__}: {words}, {divided} parameters divided"
    return Verdict("to rounding" if is_right else "WRONG", words)


def _divided(task: str, model_type: str, widen: bool) -> Any:
    model = _whole(task, model_type, widen)
    return parallelize(model, plan_of(model), parallel_loss=True)


def _distance_of_sequence(task: str, model_type: str, whole: Any) -> float | None:
    """Greatest difference in float64 under sequence parallelism; ``None`` for layers that refuse it."""
    model = _whole(task, model_type, True)
    try:
        check_layers(model, plan_of(model))
    except ValueError:
        return None
    parallelize(model, plan_of(model), sequence_parallel=True, parallel_loss=True)
    return _distance(task, model, whole)[0]


def _whole(task: str, model_type: str, widen: bool) -> Any:
    model: Any = build(task, model_type)
    without_randomness(model)
    without_cache(model)
    return to_float64(model) if widen else model


def _distance(task: str, model: Any, whole: Any) -> tuple[float, str]:
    """Greatest difference of loss and gradients on this rank, and the name of its parameter."""
    return max(difference(model, whole, inputs(task, whole, shape)) for shape in _SHAPES)
