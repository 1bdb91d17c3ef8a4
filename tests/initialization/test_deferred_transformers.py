"""Bit-for-bit results of ``deferred_init`` for Hugging Face models, whose constructors initialise all weights."""

import copy

import pytest

from tests.initialization.eager_and_deferred import check
from tools.zoo import build

TYPES = {
    "causal-lm": (
        "bloom falcon_h1 gemma3_text gpt2 gpt_neox gpt_oss llama mamba2 mixtral opt qwen2_moe qwen3_next rwkv xglm "
        "deepseek_v3"
    ),
    "masked-lm": "bert deberta-v2 distilbert modernbert mra",
    "seq2seq-lm": "bart bigbird_pegasus longt5 t5",
    "image-classification": "beit convnextv2 regnet resnet segformer swinv2 vit",
}


@pytest.mark.parametrize(("task", "model_type"), [(task, name) for task in TYPES for name in TYPES[task].split()])
def test_types(task: str, model_type: str) -> None:
    model = build(task, model_type, device="meta")
    check(lambda: type(model)(copy.deepcopy(model.config)))
