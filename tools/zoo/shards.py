"""Shards sweep: each type on two replicas of two stages, sharded by ``fully_shard``, against unsharded replicas.

Each rank trains three models of the same weights over four steps of padded batches that differ between the replicas:
whole, sharded once a step, and sharded for each microbatch; in float64 throughout, and again in float32. Losses,
gradients and parameters are compared. A type is

- exact: equal to the last bit, in all forms;
- to rounding: the greatest difference is below 1e-12 of the greatest value of its tensor, and below as many roundings
  in float32. Gradients of a tied weight, and those that are reduced for each microbatch, add up in a different order. A
  type whose code between the layers takes no mode of torch's functions computes in float32 in places. The order moves
  its values by 1e-16, and float32 rounds about one value in 1e9 the other way for it; such a value differs by 6e-8;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else.
"""

from collections.abc import Callable
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
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import is_refusal, without_cache, without_randomness
from tools.zoo.inputs import PADDED
from tools.zoo.sweep import Verdict

RANKS = 4
STAGES = 2
MICROBATCHES = 4
STEPS = 4
EQUAL = 1e-12
# As many roundings.
EQUAL_IN_FLOAT32 = EQUAL * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
ORDER = ("exact", "to rounding", "refused", "failing", "WRONG")
# A gradient of zero but for rounding, such as a key bias's, has no scale of its own.
FLOOR = 1e-6


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type over four ranks."""
    build(task, model_type, "meta")
    found = forked_ranks(RANKS, partial(rank_verdict, task, model_type), timeout=600.0)
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        error = min(errors, key=lambda each: "Connection closed" in str(each))
        return Verdict("failing", f"{type(error).__name__}: {error}")
    verdicts: list[Verdict] = found
    return max(verdicts, key=lambda verdict: (ORDER.index(verdict.result), verdict.words))


def rank_verdict(task: str, model_type: str, rank: int) -> Verdict:
    """Verdict of one of the ranks, in a process of its own."""
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES, hang_timeout=60)
    form, told, results = "whole", [], []
    try:
        for dtype, equal in ((torch.float64, EQUAL), (torch.float32, EQUAL_IN_FLOAT32)):
            form, mode = f"whole in {_named(dtype)}", Float64 if dtype is torch.float64 else nullcontext
            try:
                whole = _trained(task, model_type, dtype, mode, shards=False)
            except TracingError as error:
                if "TorchFunctionMode" not in str(error):
                    raise
                if not _computes_in_float64(task, model_type):
                    told.append("float32 only")
                    continue
                mode = nullcontext
                told.append("float32 in places")
                whole = _trained(task, model_type, dtype, mode, shards=False)
            if dtype is torch.float64 and not all(bool(values.isfinite().all()) for values in whole.values()):
                told.append("float32 only: one process has no finite numbers in float64")
                continue
            for each, words in ((False, "once a step"), (True, "for each microbatch")):
                form = f"{words} in {_named(dtype)}"
                ours = _trained(task, model_type, dtype, mode, shards=True, reshard_after_forward=each)
                found, where = distance(ours, whole, FLOOR)
                results.append("exact" if not found else "to rounding" if found < equal else "WRONG")
                told += [f"{form} {found:.1e} at {where}"] if found else []
    except Exception as error:
        result = "refused" if is_refusal(error) else "failing"
        return Verdict(result, f"{form}: {type(error).__name__}: {error}")
    return Verdict(max(results, key=ORDER.index), "; ".join(told))


def _computes_in_float64(task: str, model_type: str) -> bool:
    """Return whether one process can compute the model in float64 without a mode: its code may name float32."""
    bare: Any = build(task, model_type)
    batch = inputs(task, bare, PADDED, seed=0)
    names = ARGUMENTS.get(model_type, {}).get("input_names", batch)
    try:
        with torch.no_grad():
            to_float64(bare)(**{name: batch[name] for name in names})
    except RuntimeError:
        return False
    return True


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _trained(
    task: str, model_type: str, dtype: torch.dtype, mode: Callable[[], Any], *, shards: bool, **settings: Any
) -> Numbers:
    """Losses of each step, the gradients of the last one, and the parameters after it."""
    bare: Any = build(task, model_type)
    without_randomness(bare)
    without_cache(bare)
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    replica = parallel_state.get_data_parallel_rank()
    batches = [inputs(task, bare, PADDED, seed=10 * replica + step) for step in range(STEPS)]
    if dtype is torch.float64:
        bare = to_float64(bare)
    model = NxDPPModel(bare, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **given)
    model.move_model_to_device()
    if shards:
        nxdpp.fully_shard(model, **settings)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=1e-2, momentum=0.9)
    numbers = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with mode():
            numbers[f"loss {step}"] = model.run_train(**{name: batch[name] for name in given.get("input_names", batch)})
        optimizer.step()
    return numbers | state_of(model)
