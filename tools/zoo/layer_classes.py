"""Layer-class sweep: each class among a model's modules as ``transformer_layer_cls``, against one process.

A user may name any class: the attention, a norm, ``nn.Linear``. Code above such a "layer" is then traced, the model's
own attention too. Each class trains over two ranks on batches without a mask, with a mask of ones, and padded; loss and
gradients are compared with the unwrapped model's. A class is

- exact: equal to the last bit;
- to rounding: the difference is below 1e-5 of the greatest value of its tensor;
- refused: every rank raises our error, and nothing has changed;
- failing: another error, or one on some ranks only;
- WRONG: anything else.

A type has the verdict of its worst class. Its words have the number of classes of each verdict, and the worst ones'
reasons, and in place of the numbers of values it has the names of the classes that are refused.

Where no label is left out, the unwrapped model takes the whole batch in one piece, else the same microbatches.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.forked_ranks import forked_ranks
from tests.support.models import microbatches
from tests.support.whole_numbers import distance
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import ROUNDING, is_refusal, without_cache, without_randomness
from tools.zoo.inputs import PADDED
from tools.zoo.sweep import Verdict

TYPES = {
    "causal-lm": ("bloom", "gemma3_text", "gpt2", "gpt_neox", "llama", "opt", "qwen2_moe", "qwen3"),
    "masked-lm": ("bert",),
    "seq2seq-lm": ("t5",),
}
TIME_LIMIT = 1800.0  # seconds for a type
RANKS = 2
MICROBATCHES = 2
ORDER = ("exact", "to rounding", "refused", "failing", "WRONG")
# A gradient of zero but for rounding, such as a key bias's, has no scale of its own.
_FLOOR = 1e-4

Batch = dict[str, torch.Tensor]


def judge(task: str, model_type: str) -> Verdict:
    """Compare every class of one type over two ranks."""
    verdicts = {cls.__name__: of_class(task, model_type, cls) for cls in classes_of(build(task, model_type, "meta"))}
    return summed(verdicts)


def classes_of(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of the modules of ``model``, in the order of their first modules."""
    return list(dict.fromkeys(map(type, model.modules())))


def summed(verdicts: dict[str, Verdict]) -> Verdict:
    """The verdict of a type from those of its classes."""
    counts = Counter(verdict.result for verdict in verdicts.values())
    told = [", ".join(f"{counts[result]} {result}" for result in ORDER if counts[result])]
    worst = max(counts, key=ORDER.index)
    told += [f"{name}: {verdict.words}" for name, verdict in verdicts.items() if verdict.result == worst]
    refused = [name for name, verdict in verdicts.items() if verdict.result == "refused"]
    return Verdict(worst, "; ".join(told), ", ".join(refused))


def of_class(task: str, model_type: str, cls: type[nn.Module], ranks: int = RANKS) -> Verdict:
    """Compare the type cut after modules of ``cls``."""
    found = forked_ranks(ranks, partial(rank_verdict, task, model_type, cls, ranks), timeout=100.0)
    if errors := [each for each in found if isinstance(each, Exception)]:
        return Verdict("failing", f"{type(errors[0]).__name__}: {errors[0]}")
    verdicts: list[Verdict] = found
    if len({verdict.result == "refused" for verdict in verdicts}) > 1:
        return Verdict("failing", "; ".join(f"{verdict.result} {verdict.words}" for verdict in verdicts))
    return max(verdicts, key=lambda verdict: ORDER.index(verdict.result))


def rank_verdict(task: str, model_type: str, cls: type[nn.Module], ranks: int, rank: int) -> Verdict:
    """Verdict of one of the ranks, in a process of its own. ``received`` has the results of the batches."""
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks, hang_timeout=60)
    model: Any = build(task, model_type)
    without_randomness(model)
    without_cache(model)
    whole = copy.deepcopy(model)
    given: dict[str, Any] = {**ARGUMENTS.get(model_type, {}), "transformer_layer_cls": cls}
    try:
        wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **given)
    except Exception as error:
        return _of_error(error)
    found = [_of_batch(wrapped, whole, batch) for batch in batches(task, whole)]
    result = max((verdict.result for verdict in found), key=ORDER.index)
    words = next((verdict.words for verdict in found if verdict.result == result), "")
    return Verdict(result, words, ", ".join(verdict.result for verdict in found))


def _of_batch(wrapped: Any, whole: Any, batch: Batch) -> Verdict:
    wrapped.zero_grad()
    whole.zero_grad()
    local = dict(wrapped.local_named_parameters())
    try:
        ours = {"loss": wrapped.run_train(**batch)} | _gradients(local)
    except Exception as error:
        changed = [*_gradients(local)]
        return Verdict("failing", f"after the gradient of {changed[0]}: {error}") if changed else _of_error(error)
    parts = [batch] if _is_full(batch) else microbatches(batch, MICROBATCHES)
    theirs = {"loss": torch.stack([_backward(whole, one, len(parts)) for one in parts]).mean()}
    theirs |= _gradients({n: p for n, p in whole.named_parameters(remove_duplicate=False) if n in local})
    worst, where = distance(ours, theirs, _FLOOR)
    words = f"{worst:.1e} at {where}" if worst else ""
    return Verdict("exact" if not worst else "to rounding" if worst < ROUNDING else "WRONG", words)


def _gradients(parameters: Mapping[str, nn.Parameter]) -> Batch:
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def _is_full(batch: Batch) -> bool:
    return "attention_mask" not in batch or bool(batch["attention_mask"].all())


def _backward(whole: Any, batch: Batch, parts: int) -> torch.Tensor:
    loss: torch.Tensor = whole(**batch).loss
    (loss / parts).backward()
    return loss.detach()


def _of_error(error: Exception) -> Verdict:
    return Verdict("refused" if is_refusal(error) else "failing", f"{type(error).__name__}: {error}")


def batches(task: str, model: Any) -> Sequence[Batch]:
    """A batch without a mask, one with a mask of ones, and a padded one."""
    plain = inputs(task, model, 0)
    padded = inputs(task, model, PADDED)
    ones = torch.ones_like(plain["input_ids"])
    return plain, {**plain, "attention_mask": ones}, padded
