"""Microbatches of an encoder and a decoder of which only some have padding: transformers leaves out their masks."""

import copy
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel, T5Config, T5ForConditionalGeneration

from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance

_SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "use_cache": False, "decoder_start_token_id": 0}
_T5: dict[str, Any] = {"d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_BART: dict[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 20,
}  # fmt: skip
STAGES = 4  # The decoder is cut: two stages need the mask of the encoder's output.


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(**_SIZES, **_T5))


def bart() -> PreTrainedModel:
    return BartForConditionalGeneration(BartConfig(**_SIZES, **_BART))


# Two decoder stages use the encoder's output, each several times: documented as equal to rounding.
@pytest.mark.parametrize(("make", "near"), [(t5, 0.0), (bart, 1e-6)])
def test_a_mask_that_some_microbatches_lack_is_exact(make: Any, near: float) -> None:
    torch.manual_seed(0)
    model = make().train()
    whole = copy.deepcopy(model)
    batch = {"input_ids": torch.randint(3, 32, (4, 10)), "labels": torch.randint(3, 32, (4, 6))}
    batch["attention_mask"] = torch.ones(4, 10, dtype=torch.long)
    batch["attention_mask"][[1, 3], 7:] = 0

    pipeline = InProcessPipeline(model, STAGES)

    assert distance(pipeline, model, whole, batch, 4) <= near
