"""Shards sweep: each type on two replicas of two stages, sharded by ``fully_shard``, against unsharded replicas.

Each rank trains three models of the same weights over four steps of padded batches that differ between the replicas:
whole, sharded once a step, and sharded for each microbatch. Losses, gradients and parameters are compared in float64
throughout. A type is

- exact: equal to the last bit, both ways;
- to rounding: the greatest difference is below 1e-12 of the greatest value of its tensor. Gradients of a tied weight,
  and those that are reduced for each microbatch, add up in a different order. A type whose code between the layers
  takes no mode of torch's functions computes in float32 in places. The order moves its values by 1e-16, and float32
  rounds about one value in 1e9 the other way for it; such a value differs by 6e-8;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.tensor.models.comparison import Float64, to_float64
from nxdpp.tracing.graph.errors import TracingError
from tests.support.forked_ranks import forked_ranks
from tests.support.whole_numbers import Numbers, distance, state_of
from tests.zoo import ARGUMENTS, build, inputs
from tests.zoo.comparison import is_refusal, without_cache, without_randomness
from tests.zoo.inputs import PADDED
from tests.zoo.sweep import Verdict

RANKS = 4
STAGES = 2
MICROBATCHES = 4
STEPS = 4
EQUAL = 1e-12

# A gradient of zero but for rounding, such as a key bias's, has no scale of its own.
FLOOR = 1e-6


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type over four ranks."""
    build(task, model_type, "meta")
    found = forked_ranks(RANKS, partial(rank_verdict, task, model_type))
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        error = min(errors, key=lambda each: "Connection closed" in str(each))
        return Verdict("failing", f"{type(error).__name__}: {error}")
    verdicts: list[Verdict] = found
    order = ("exact", "to rounding", "refused", "failing", "WRONG")
    return max(verdicts, key=lambda verdict: (order.index(verdict.result), verdict.words))


def rank_verdict(task: str, model_type: str, rank: int) -> Verdict:
    """Verdict of one of the ranks, in a process of its own."""
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES, hang_timeout=60)
    form, widens = "whole", True
    try:
        try:
            whole = _trained(task, model_type, widens, shards=False)
        except TracingError as error:
            if "TorchFunctionMode" not in str(error):
                raise
            widens = False
            whole = _trained(task, model_type, widens, shards=False)
        form = "once a step"
        once, where = distance(_trained(task, model_type, widens, shards=True), whole, FLOOR)
        form = "for each microbatch"
        ours = _trained(task, model_type, widens, shards=True, reshard_after_forward=True)
        each, there = distance(ours, whole, FLOOR)
    except Exception as error:
        result = "refused" if is_refusal(error) else "failing"
        return Verdict(result, f"{form}: {type(error).__name__}: {error}")
    if not once and not each:
        return Verdict("exact")
    told = f"once a step {once:.1e} at {where}, for each microbatch {each:.1e} at {there}"
    told += "" if widens else "; float32 in places"
    return Verdict("to rounding" if max(once, each) < EQUAL else "WRONG", told)


def _trained(task: str, model_type: str, widens: bool, *, shards: bool, **settings: Any) -> Numbers:
    """Losses of each step, the gradients of the last one, and the parameters after it."""
    bare: Any = build(task, model_type)
    without_randomness(bare)
    without_cache(bare)
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    replica = parallel_state.get_data_parallel_rank()
    batches = [inputs(task, bare, PADDED, seed=10 * replica + step) for step in range(STEPS)]
    model = NxDPPModel(to_float64(bare), num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **given)
    model.move_model_to_device()
    if shards:
        nxdpp.fully_shard(model, **settings)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=1e-2, momentum=0.9)
    numbers = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with Float64() if widens else nullcontext():
            numbers[f"loss {step}"] = model.run_train(**{name: batch[name] for name in given.get("input_names", batch)})
        optimizer.step()
    return numbers | state_of(model)
