"""Experts sweep: each mixture with its experts divided over data-parallel ranks, against one process.

Each rank trains its part on a padded batch of its own, and one process the whole model on the batches of all replicas,
in the same microbatches. Mean loss and every gradient are compared, as a share of the greatest value of the tensor, in
float64 throughout: in the layouts e=2, e=4, and two stages with e=2. A type is

- exact: equal to the last bit;
- to rounding: the greatest difference is below 1e-12;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.initialization.parts import own_part
from nxdpp.tensor.models.comparison import Float64, to_float64
from tests.support.forked_ranks import forked_ranks
from tests.support.training_distance import loss_of
from tests.support.whole_numbers import Numbers, distance
from tools.zoo import ARGUMENTS, build, inputs, types
from tools.zoo.comparison import MICROBATCHES, Batch, is_refusal, microbatches_of, without_cache, without_randomness
from tools.zoo.inputs import PADDED
from tools.zoo.sweep import Verdict

# Pipeline stages and ranks of an expert group; all ranks of a stage are one expert group.
LAYOUTS = ((1, 2), (1, 4), (2, 2))
# Tasks with all their mixtures, or with those whose experts no earlier task has.
MIXTURES: dict[str, tuple[str, ...]] = {
    "causal-lm": (),
    "seq2seq-lm": (),
    "image-text-to-text": (),
    "token-classification": ("openai_privacy_filter",),
}
# Plans of types that bring none.
_OF_DBRX = "transformer.blocks.*.ffn.experts"
PLANS = {
    "dbrx": dict.fromkeys([f"{_OF_DBRX}.mlp.{name}" for name in ("w1", "v1", "w2")], "grouped_gemm")
    | {_OF_DBRX: "ep_dispatch_experts"},
    "jetmoe": {f"model.layers.*.mlp.{name}_linear.weight": "grouped_gemm" for name in ("input", "output")},
}
EQUAL = 1e-12
# Seconds for the ranks of a layout, and for a type.
RANKS_LIMIT = 300.0
TIME_LIMIT = len(LAYOUTS) * RANKS_LIMIT
ORDER = ("exact", "to rounding", "refused", "failing", "WRONG")
# A gradient of zero but for rounding, such as a key bias's, has no scale of its own.
FLOOR = 1e-6


def mixtures(task: str) -> list[str]:
    """The types of ``task`` with modules of experts, whether these can be divided or not."""
    return list(MIXTURES.get(task, ())) or [name for name in types(task) if _is_mixture(task, name)]


def _is_mixture(task: str, model_type: str) -> bool:
    try:
        model: Any = build(task, model_type, "meta")
    except Exception:
        return False
    named = any("experts" in name.split(".") for name, _ in model.named_modules())
    return named or bool(getattr(model.config, "num_local_experts", 0))


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type in each layout until it is not right in one."""
    build(task, model_type, "meta")
    told, result = [], "exact"
    for stages, ranks in LAYOUTS:
        found = forked_ranks(stages * ranks, partial(rank_verdict, task, model_type, stages, ranks), RANKS_LIMIT)
        layout = f"e={ranks}" if stages == 1 else f"{stages} stages, e={ranks}"
        if errors := [each for each in found if isinstance(each, Exception)]:
            # The other ranks lose their connection.
            error = min(errors, key=lambda each: "Connection closed" in str(each))
            return Verdict("failing", f"{layout}: {type(error).__name__}: {error}")
        verdicts: list[Verdict] = found
        worst = max(verdicts, key=lambda each: (ORDER.index(each.result), each.words))
        result = max(result, worst.result, key=ORDER.index)
        told += [f"{layout}: {worst.words}"] if worst.words else []
        if ORDER.index(result) > ORDER.index("to rounding"):
            return Verdict(result, told[-1])
    return Verdict(result, "; ".join(told))


def rank_verdict(task: str, model_type: str, stages: int, ranks: int, rank: int) -> Verdict:
    """Verdict of one of the ranks, in a process of its own."""
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, expert_model_parallel_size=ranks, hang_timeout=RANKS_LIMIT
    )
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    whole, bare = (_whole(task, model_type) for _ in range(2))
    batches = [inputs(task, whole, PADDED, seed=replica) for replica in range(ranks)]
    batches = [{name: _wide(batch[name]) for name in given.get("input_names", batch)} for batch in batches]
    try:
        with Float64():
            model = NxDPPModel(
                expert_parallelize(bare, PLANS.get(model_type)),
                num_microbatches=MICROBATCHES,
                broadcast_and_average_loss=True,
                **given,
            )
            loss = model.run_train(**batches[parallel_state.get_data_parallel_rank()])
    except Exception as error:
        return Verdict("refused" if is_refusal(error) else "failing", f"{type(error).__name__}: {error}")
    expected = {"loss": _of_one_process(whole, batches)}
    ours: dict[str, torch.Tensor] = {"loss": loss}
    for name, parameter in model.local_named_parameters():
        gradient = whole.get_parameter(name).grad
        # An expert without a token has zeros, or no gradient.
        theirs = torch.zeros_like(parameter) if gradient is None else own_part(gradient, parameter)
        expected[name] = theirs
        ours[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return _verdict(ours, expected)


def _verdict(ours: Numbers, expected: Numbers) -> Verdict:
    found, where = distance(ours, expected, FLOOR)
    if not found:
        return Verdict("exact")
    return Verdict("to rounding" if found < EQUAL else "WRONG", f"{found:.1e} at {where}")


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _whole(task: str, model_type: str) -> Any:
    model: Any = build(task, model_type)
    without_randomness(model)
    without_cache(model)
    return to_float64(model)


def _of_one_process(whole: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """Train on the batches of all replicas; return the mean loss."""
    parts = [part for batch in batches for part in microbatches_of(batch)]
    losses = []
    for part in parts:
        with Float64():
            loss = loss_of(whole(**part))
            (loss / len(parts)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()
