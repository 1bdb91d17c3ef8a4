"""Generation sweep: each type is cut in two and in four, generates, and is compared with the unwrapped model.

The ranks are threads of one process. Each has a copy of the model in which the parameters of other ranks are
not-a-number. A type generates greedily, by sampling from one seed, and with beams, from tokens with and without padding
on the left. A type is

- exact: tokens and logits are equal to the last bit;
- to rounding: tokens are equal, and logits differ by less than 1e-5 of their greatest value;
- refused: our error has the reason;
- failing: another error;
- WRONG: anything else.

A type that does not generate in one process does not build. Types of images or sounds for which the zoo has no inputs
that they generate from get tokens only.
"""

import copy
import math
from typing import Any

import torch

from tests.support.generating_threads import generate_on_threads
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import ROUNDING, is_refusal, without_randomness
from tools.zoo.inputs.shapes import taken
from tools.zoo.sweep import Verdict

GENERATING = ("causal-lm", "seq2seq-lm", "image-text-to-text", "speech-seq2seq")

_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": 2},
}
_NEW = 5
_OF_MEDIA = ("pixel_values", "input_features", "input_values")
_NOT_GIVEN = ("labels", "decoder_input_ids", "decoder_attention_mask")


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type with its unwrapped model."""
    try:
        model: Any = build(task, model_type).eval()
    except Exception as error:
        return Verdict("does not build", f"{type(error).__name__}: {error}")
    without_randomness(model)
    if hasattr(model, "generation_config"):
        model.generation_config.pad_token_id = 0
    try:
        batch = _inputs(task, model)
    except Exception as error:
        return Verdict("does not build", f"does not generate: {type(error).__name__}: {error}")
    worst, notes = 0.0, []
    if list(batch) == ["input_ids"] and any(name.startswith(_OF_MEDIA) for name in taken(model)):
        notes.append("tokens only")
    if list(batch) == ["input_ids"]:
        batch = {"input_ids": batch["input_ids"][:2]}
    ids = batch.get("input_ids")
    given: dict[str, Any] = ARGUMENTS.get(model_type, {})
    for name, settings in _MODES.items():
        for padding in (0, 2) if list(batch) == ["input_ids"] else (0,):
            arguments: dict[str, Any] = {**batch, "max_new_tokens": _NEW, **settings}
            if padding:
                assert ids is not None
                mask = torch.ones_like(ids)
                mask[0, :padding] = 0
                arguments["attention_mask"] = mask
            arguments |= {"return_dict_in_generate": True, "output_logits": True}
            try:
                torch.manual_seed(7)
                expected = copy.deepcopy(model).generate(**arguments)
            except Exception as error:
                if name == "greedy" and not padding:
                    return Verdict("does not build", f"does not generate: {type(error).__name__}: {error}")
                notes.append(f"no {name}")
                continue
            for stages in (2, 4):
                how = f"{stages} stages, {name}"
                try:
                    torch.manual_seed(7)
                    found = generate_on_threads(model, stages, arguments, **given)
                except Exception as error:
                    if stages == 4 and "layers cannot be split" in str(error):
                        continue
                    result = "refused" if is_refusal(error) else "failing"
                    return Verdict(result, f"{how}: {type(error).__name__}: {error}")
                for result in found:
                    if not torch.equal(result["sequences"], expected["sequences"]):
                        return Verdict("WRONG", f"{how}: other tokens")
                worst = max(worst, _distance(found[-1]["logits"], expected["logits"]))
    result = "exact" if worst == 0 else "to rounding" if worst < ROUNDING else "WRONG"
    words = [f"{worst:.1e}"] if worst else []
    return Verdict(result, "; ".join([*words, *dict.fromkeys(notes)]))


def _inputs(task: str, model: Any) -> dict[str, torch.Tensor]:
    """The arguments of ``task`` from which ``model`` generates, otherwise tokens. Raises the model's error for both."""
    try:
        batch = {name: value for name, value in inputs(task, model, 0).items() if name not in _NOT_GIVEN}
        copy.deepcopy(model).generate(**batch, max_new_tokens=1)
    except Exception:
        if model.main_input_name != "input_ids":
            raise
        batch = {"input_ids": torch.randint(32, 120, (4, 12), generator=torch.Generator().manual_seed(0))}
        copy.deepcopy(model).generate(**batch, max_new_tokens=1)
    return batch


def _distance(found: Any, expected: Any) -> float:
    """Greatest difference of logits, as a share of their greatest value."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if not torch.equal(ours, theirs):
            difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst
