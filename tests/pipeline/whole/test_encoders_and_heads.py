"""Encoders with decoders, and heads of sequences, of transformers: stages have the numbers of one process."""

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance

_ENCODER: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 20,
    "pooler_dropout": 0.0, "pooler_hidden_size": 16,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "classifier_dropout": 0.0, "decoder_start_token_id": 0, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "dropout": 0.0, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_position_embeddings": 20, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "vocab_size": 64, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "use_cache": False,
}  # fmt: skip


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(**_T5))


def bart() -> PreTrainedModel:
    return BartForConditionalGeneration(BartConfig(**_BART))


# Two decoder stages use the encoder's output, each several times: documented as equal to rounding.
@pytest.mark.parametrize(("make", "near"), [(t5, 0.0), (bart, 1e-6)])
def test_a_mask_that_some_microbatches_lack_is_exact(make: Any, near: float) -> None:
    """Only some microbatches have padding: transformers leaves out the masks of the others."""
    torch.manual_seed(0)
    model = make().train()
    whole = copy.deepcopy(model)
    batch = {"input_ids": torch.randint(3, 32, (4, 10)), "labels": torch.randint(3, 32, (4, 6))}
    batch["attention_mask"] = torch.ones(4, 10, dtype=torch.long)
    batch["attention_mask"][[1, 3], 7:] = 0
    # The decoder is cut: two of four stages need the mask of the encoder's output.
    assert distance(InProcessPipeline(model, 4), model, whole, batch, 4) <= near


def test_whisper_is_cut_and_exact() -> None:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**_WHISPER))
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, 2)
    for length in (8, 5):
        batch = {"input_features": torch.randn(4, 16, 40), "labels": torch.randint(4, 64, (4, length))}
        # Every decoder layer uses the encoder's output. Its gradient is summed stage by stage.
        assert distance(pipeline, model, whole, batch, 2) < 1e-6


@pytest.mark.parametrize(
    ("kind", "classes", "labels"),
    [
        ("T5", 3, [0, 2, 1, 0]),
        ("DebertaV2", 3, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("Roberta", 1, [0.5, 2.0, -1.0, 0.25]),
    ],
    ids=["classes", "several classes", "a number"],
)
def test_the_dtype_of_labels_chooses_the_loss_of_a_head(kind: str, classes: int, labels: list[Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(_T5 if kind == "T5" else _ENCODER), num_labels=classes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).train()
    whole = copy.deepcopy(model)
    ids = torch.randint(3, 32, (4, 7), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 2
    batch = {"input_ids": ids, "labels": torch.tensor(labels)}
    # A tied weight is summed in another order.
    assert distance(InProcessPipeline(model, 2), model, whole, batch, 2) <= (1e-6 if kind == "T5" else 0)
