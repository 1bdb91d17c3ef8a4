"""Bit-for-bit results of ``deferred_init`` for Hugging Face models, whose constructors initialise all weights."""

import copy

import pytest

from tests.initialization.eager_and_deferred import check
from tools.zoo import build

TYPES = {
    "causal-lm": "falcon_h1 gpt_oss llama mamba2 mixtral rwkv",
    "masked-lm": "deberta-v2 mra",
    "seq2seq-lm": "bigbird_pegasus t5",
    "image-classification": "regnet swinv2",
}


@pytest.mark.parametrize(("task", "model_type"), [(task, name) for task in TYPES for name in TYPES[task].split()])
def test_types(task: str, model_type: str) -> None:
    model = build(task, model_type, device="meta")
    check(lambda: type(model)(copy.deepcopy(model.config)))
