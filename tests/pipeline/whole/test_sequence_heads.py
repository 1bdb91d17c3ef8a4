"""Heads for sequence classification, which choose their loss by the dtype of the labels."""

import copy
from typing import Any

import pytest
import torch
import transformers

from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance

_ENCODER: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 20,
    "pooler_dropout": 0.0, "pooler_hidden_size": 16,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "classifier_dropout": 0.0, "decoder_start_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "classes", "labels"),
    [
        ("T5", 3, [0, 2, 1, 0]),
        ("DebertaV2", 3, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("Roberta", 1, [0.5, 2.0, -1.0, 0.25]),
    ],
    ids=["classes", "several classes", "a number"],
)
def test_the_loss_and_the_gradients_are_those_of_one_process(kind: str, classes: int, labels: list[Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(_T5 if kind == "T5" else _ENCODER), num_labels=classes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).train()
    whole = copy.deepcopy(model)
    ids = torch.randint(3, 32, (4, 7), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 2
    batch = {"input_ids": ids, "labels": torch.tensor(labels)}
    # A tied weight is summed in another order.
    assert distance(InProcessPipeline(model, 2), model, whole, batch, 2) <= (1e-6 if kind == "T5" else 0)
