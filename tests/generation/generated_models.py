"""Tiny models that generate, and prompts."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.models import VOCABULARY, gpt2, llama


def _seeded(make: Callable[..., Any], **changes: Any) -> Any:
    torch.manual_seed(1234)
    return make(**changes)


def _t5() -> Any:
    sizes: Any = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    return T5ForConditionalGeneration(
        T5Config(**{"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "dropout_rate": 0.0, **sizes})
    )


def _adapted() -> Any:
    return get_peft_model(
        gpt2(), LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False, fan_in_fan_out=True)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _seeded(llama, initializer_range=0.3),
    "adapted gpt2": lambda: _seeded(_adapted),
    "dropped gpt2": lambda: _seeded(gpt2, dropout=0.1),
    "t5": lambda: _seeded(_t5),
}


def prompt(rows: int, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Tokens (rows, length)."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
