"""Context sweep: each causal type with sequences over two and four context ranks, against one process.

Ranks of one stage, then of two, train two microbatches of padded batches, in float64 throughout. The loss and each
gradient are compared with those of the model in one process, as a share of the greatest value. A type is

- to rounding: the greatest difference is below 1e-12. A type whose code takes no mode of torch's functions computes in
  float32 in places, where it is below as many roundings of float32;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from nxdpp import NxDPPModel, context_parallelize, parallel_state
from nxdpp.tensor.models.comparison import Float64, to_float64
from nxdpp.tracing.graph.errors import TracingError
from tests.support.forked_ranks import forked_ranks
from tests.support.training_distance import loss_of
from tests.support.whole_numbers import Numbers, distance
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import is_refusal, microbatches_of, without_cache, without_randomness
from tools.zoo.inputs import PADDED
from tools.zoo.shards import EQUAL, EQUAL_IN_FLOAT32, FLOOR, ORDER
from tools.zoo.sweep import Verdict

# Stages and context ranks.
LAYOUTS = ((1, 2), (2, 2), (1, 4))
MICROBATCHES = 4


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type in each layout, the worst of which counts; a refusal ends it."""
    build(task, model_type, "meta")
    worst = Verdict("exact")
    for layout in LAYOUTS:
        found = forked_ranks(layout[0] * layout[1], partial(rank_verdict, task, model_type, layout), timeout=300.0)
        verdicts = [each for each in found if isinstance(each, Verdict)]
        # A rank that fails ends the others.
        stopped = [each for each in verdicts if each.result in ("refused", "failing")]
        if stopped or len(verdicts) < len(found):
            errors = [Verdict("failing", f"{layout}: {each}") for each in found if isinstance(each, Exception)]
            return (stopped or errors)[0]
        verdicts.append(worst)
        worst = max(verdicts, key=lambda verdict: (ORDER.index(verdict.result), verdict.words))
        if worst.result == "WRONG":
            break
    return worst


def rank_verdict(task: str, model_type: str, layout: tuple[int, int], rank: int) -> Verdict:
    """Verdict of one of the ranks, in a process of its own."""
    torch.set_num_threads(1)
    stages, ranks = layout
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, context_parallel_size=ranks, hang_timeout=60
    )
    try:
        mode: Callable[[], Any] = Float64
        equal = EQUAL
        try:
            ours = _over_ranks(task, model_type, mode)
        except TracingError as error:
            if "TorchFunctionMode" not in str(error):
                raise
            mode, equal = nullcontext, EQUAL_IN_FLOAT32
            ours = _over_ranks(task, model_type, mode)
        whole = _alone(task, model_type, mode)
    except Exception as error:
        return Verdict("refused" if is_refusal(error) else "failing", f"{layout}: {type(error).__name__}: {error}")
    found, where = distance(ours, {name: whole[name] for name in ours}, FLOOR)
    return Verdict(
        "exact" if not found else "to rounding" if found < equal else "WRONG", f"{found:.1e} at {where}, {layout}"
    )


def _model(task: str, model_type: str) -> tuple[Any, dict[str, torch.Tensor]]:
    bare: Any = build(task, model_type)
    without_randomness(bare)
    without_cache(bare)
    batch = inputs(task, bare, PADDED)
    names = ARGUMENTS.get(model_type, {}).get("input_names", batch)
    return to_float64(bare), {name: batch[name] for name in names}


def _over_ranks(task: str, model_type: str, mode: Callable[[], Any]) -> Numbers:
    bare, batch = _model(task, model_type)
    given: dict[str, Any] = ARGUMENTS.get(model_type, {})
    model = NxDPPModel(
        context_parallelize(bare), num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **given
    )
    model.move_model_to_device()
    with mode():
        loss = model.run_train(**batch)
    gradients = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    return {"loss": loss, **{name: each for name, each in gradients.items() if each is not None}}


def _alone(task: str, model_type: str, mode: Callable[[], Any]) -> Numbers:
    model, batch = _model(task, model_type)
    with mode():
        losses = [loss_of(model(**part)) / MICROBATCHES for part in microbatches_of(batch)]
        for loss in losses:
            loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return {"loss": torch.stack(losses).sum().detach(), **gradients}
