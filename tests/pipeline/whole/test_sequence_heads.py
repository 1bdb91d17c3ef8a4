"""Heads for sequence classification, which choose their loss by the dtype of the labels."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from tests.support.in_process import InProcessPipeline

CLASSES = 3
_ENCODER: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 20,
}  # fmt: skip
_POOLER: dict[str, Any] = {"pooler_dropout": 0.0, "pooler_hidden_size": 16}
_T5: dict[str, Any] = {
    "vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "classifier_dropout": 0.0, "decoder_start_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "roberta": lambda **labels: RobertaForSequenceClassification(RobertaConfig(**_ENCODER, **labels)),
    "t5": lambda **labels: T5ForSequenceClassification(T5Config(**_T5, **labels)),
    "deberta": lambda **labels: DebertaV2ForSequenceClassification(DebertaV2Config(**_ENCODER, **_POOLER, **labels)),
}
LABELS = {
    "classes": (CLASSES, torch.tensor([0, 2, 1, 0])),
    "a number": (1, torch.tensor([0.5, 2.0, -1.0, 0.25])),
    "several classes": (CLASSES, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])),
}


def _low() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "labels", "around"),
    [("roberta", "several classes", nullcontext), ("t5", "classes", _low), ("deberta", "a number", nullcontext)],
)
def test_the_loss_and_the_gradients_are_those_of_one_process(
    name: str, labels: str, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    classes, values = LABELS[labels]
    torch.manual_seed(0)
    model = MODELS[name](num_labels=classes)
    whole: Any = copy.deepcopy(model)
    input_ids = torch.randint(3, 32, (4, 7), generator=torch.Generator().manual_seed(1))
    input_ids[:, -1] = 2
    pipeline = InProcessPipeline(model, 2)

    with around():
        losses = pipeline.train({"input_ids": input_ids, "labels": values}, 2)

    expected = []
    for ids, part in zip(input_ids.chunk(2), values.chunk(2), strict=True):
        with around():
            loss = whole(input_ids=ids, labels=part).loss
        (loss / 2).backward()
        expected.append(loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    for (parameter, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        if parameter.endswith("shared.weight"):  # a tied weight: another order of summing
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), parameter
        else:
            assert (ours.grad is None) == (theirs.grad is None), parameter
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), parameter
