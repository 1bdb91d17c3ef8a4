"""Code above the layers asks whether a mask is there: it gets the answer of the step, for any form of the question."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from nxdpp.tracing.graph.trace import TracingOptions
from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance

WINDOW = 6


def _by_default(mask: Any = None) -> float:
    return 2.0 if mask is None else 3.0


QUESTIONS: list[Callable[[Any], float]] = [
    lambda mask: 3.0 if mask is not None else 2.0,
    lambda mask: 3.0 if isinstance(mask, Tensor) else 2.0,
    lambda mask: 2.0 if type(mask) is type(None) else 3.0,
    lambda mask: 2.0 if mask == None else 3.0,  # noqa: E711
    lambda mask: 2.0 if any(each is None for each in (mask,)) else 3.0,
    lambda mask: _by_default(**({} if mask is None else {"mask": mask})),
    lambda mask: 3.0 if mask is not None and mask.ndim == 4 else 2.0,
]


def _is_none(mask: Any) -> float:
    return 2.0 if mask is None else 3.0


def _all_questions(mask: Any) -> float:
    return math.prod(question(mask) for question in QUESTIONS) / 200


# The input was named past_key_values before transformers 5.24.
CACHE = {"cache", "past_key_values"}.intersection(inspect.signature(create_causal_mask).parameters).pop()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        scores = x @ x.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -1e9)
        mixed: Tensor = self.linear(scores.softmax(-1) @ x)
        return mixed


class Asking(PreTrainedModel):
    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any, ask: Callable[[Any], float] | None, has_window: bool = False) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.ask, self.has_window = ask, has_window

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        hidden = self.embed(input_ids)
        given: Any = {"inputs_embeds": hidden, "attention_mask": attention_mask, CACHE: None}
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        make_mask = create_sliding_window_causal_mask if self.has_window else create_causal_mask
        mask = make_mask(config=self.config, position_ids=positions, **given)
        scale = 1.0 if self.ask is None else self.ask(mask)
        for layer in self.layers:
            hidden = layer(hidden, mask) * scale
        return (hidden - labels[..., None]).pow(2).mean()


def _asking(ask: Callable[[Any], float] | None, has_window: bool = False) -> Asking:
    torch.manual_seed(0)
    config: Any = LlamaConfig(hidden_size=4, num_attention_heads=1)
    config.sliding_window = WINDOW
    config._attn_implementation = "sdpa"
    return Asking(config, ask, has_window)


def _batch(length: int = 4, masked: int | None = None) -> dict[str, Tensor]:
    ids = torch.arange(4 * length).view(4, length) % 9
    batch = {"input_ids": ids, "labels": ids}
    if masked is not None:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, length - masked :] = 0
    return batch


def _pipeline(model: nn.Module) -> InProcessPipeline:
    return InProcessPipeline(model, 2, options=TracingOptions((Block,)))


def test_a_question_has_the_answer_of_the_step() -> None:
    model = _asking(_all_questions)
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    assert distance(pipeline, model, whole, _batch(), 2) == 0


def test_a_mask_that_data_decide_is_there_or_an_error_with_the_line() -> None:
    model = _asking(_is_none)
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    assert distance(pipeline, model, whole, _batch(masked=1), 2) == 0
    with pytest.raises(RuntimeError, match=r"a value between layers is None.*\n.*test_absent_values.py"):
        pipeline.train(_batch(masked=0), 2)


def test_the_answer_belongs_to_the_sizes() -> None:
    model = _asking(_is_none, has_window=True)
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    for length in (WINDOW - 1, 2 * WINDOW):
        assert distance(pipeline, model, whole, _batch(length), 2) == 0


def test_a_mask_of_which_nobody_asks_may_be_either_in_one_graph() -> None:
    model = _asking(None)
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    for masked in (0, 1):
        assert distance(pipeline, model, whole, _batch(masked=masked), 2) == 0
    assert pipeline.programs.cut_graph(_batch(masked=0), True) is pipeline.programs.cut_graph(_batch(masked=1), True)
