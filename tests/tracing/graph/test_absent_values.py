"""Code above the layers asks whether a mask is there: it gets the answer of the step, for any form of the question."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.graph import trace as traces
from nxdpp.tracing.graph.absent_values import may_return_none
from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracingOptions, trace_for
from tests.support.in_process import InProcessPipeline
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import trace_with
from tests.support.training_distance import distance

WINDOW = 6


def _by_default(mask: Any = None) -> float:
    return 2.0 if mask is None else 3.0


QUESTIONS: dict[str, Callable[[Any], float]] = {
    "is None": lambda mask: 2.0 if mask is None else 3.0,
    "is not None": lambda mask: 3.0 if mask is not None else 2.0,
    "isinstance": lambda mask: 3.0 if isinstance(mask, Tensor) else 2.0,
    "type": lambda mask: 2.0 if type(mask) is type(None) else 3.0,
    "equal": lambda mask: 2.0 if mask == None else 3.0,  # noqa: E711
    "in": lambda mask: 2.0 if any(each is None for each in (mask,)) else 3.0,
    "default": lambda mask: _by_default(**({} if mask is None else {"mask": mask})),
    "truth": lambda mask: 3.0 if mask is not None and mask.ndim == 4 else 2.0,
}


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


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_the_answer_of_the_step(question: str) -> None:
    model = _asking(QUESTIONS[question])
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    assert distance(pipeline, model, whole, _batch(), 2) == 0


def test_a_mask_that_data_decide_is_there_or_an_error_with_the_line() -> None:
    model = _asking(QUESTIONS["is None"])
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    assert distance(pipeline, model, whole, _batch(masked=1), 2) == 0
    with pytest.raises(RuntimeError, match=r"a value between layers is None.*\n.*test_absent_values.py"):
        pipeline.train(_batch(masked=0), 2)


def test_the_answer_belongs_to_the_sizes() -> None:
    model = _asking(QUESTIONS["is None"], has_window=True)
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    for length in (WINDOW - 1, 2 * WINDOW, WINDOW - 2):
        assert distance(pipeline, model, whole, _batch(length), 2) == 0


def test_a_mask_of_which_nobody_asks_may_be_either_in_one_graph() -> None:
    model = _asking(None)
    whole, pipeline = copy.deepcopy(model), _pipeline(model)

    for masked in (0, 1):
        assert distance(pipeline, model, whole, _batch(masked=masked), 2) == 0
    assert pipeline.programs.cut_graph(_batch(masked=0), True) is pipeline.programs.cut_graph(_batch(masked=1), True)


def test_layers_that_the_model_declares_need_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_asks_for_none", lambda *given: pytest.fail("a second run"))
    trace_with(make("llama"), padded_batch(2))


def test_data_decide_inside_of_a_declared_layer() -> None:
    with pytest.raises(TracingError) as caught:
        trace_for(make("llama"), padded_batch(2), TracingOptions((nn.Linear,)))

    assert "asks whether the result of create_causal_mask is None, which is only told by the data" in str(caught.value)
    assert "transformer_layer_cls=['LlamaDecoderLayer']" in str(caught.value)


def test_functions_that_may_return_none() -> None:
    def present() -> Tensor: ...  # type: ignore[empty-body]

    def either() -> Tensor | None: ...

    def unknown():  # type: ignore[no-untyped-def]
        ...

    assert [may_return_none(each) for each in (create_causal_mask, present, either, unknown)] == [1, 0, 1, 0]


def with_a_plain_tracer(rank: int, ranks: int) -> str:
    """A tracer of torch through the layers of a Llama is refused; both remedies of its message, followed."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    batch = padded_batch(4)
    common: dict[str, Any] = {"num_microbatches": 2, "loss_normalization": "tokens", "broadcast_and_average_loss": True}
    with pytest.raises(TracingError) as caught:
        NxDPPModel(make("llama"), transformer_layer_cls=nn.Linear, tracer_cls="torch", **common)
    expected = make("llama")(**batch, use_cache=False).loss
    model = NxDPPModel(make("llama"), transformer_layer_cls=["LlamaDecoderLayer"], **common)
    torch.testing.assert_close(model.run_train(**batch), expected.detach())
    return str(caught.value)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_plain_tracer_through_layers_is_refused(ranks: int) -> None:
    for message in run_ranks(ranks, with_a_plain_tracer, ranks):
        assert (
            "single nodes: transformer_layer_cls=['LlamaDecoderLayer']. Leave tracer_cls out, or give 'hf'" in message
        )
