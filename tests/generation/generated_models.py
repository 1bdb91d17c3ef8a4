"""Tiny models that generate, and prompts."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.models import VOCABULARY, gpt2, llama


def _seeded(make: Callable[..., Any], **changes: Any) -> Any:
    torch.manual_seed(1234)
    return make(**changes)


def _t5() -> Any:
    sizes: Any = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    return T5ForConditionalGeneration(
        T5Config(**{"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "dropout_rate": 0.0, **sizes})
    )


def _llava() -> Any:
    """An image of 8 x 8 takes the places of four tokens."""
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    text = llama(initializer_range=0.3).config
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1)
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
    "llava": lambda: _seeded(_llava),
}


def prompt(rows: int, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Tokens (rows, length)."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def prompt_with_images(*images: int) -> dict[str, torch.Tensor]:
    """Tokens and images; each row has a number of ``images``, and padding on the left."""
    length = 4 + 4 * max(images)
    ids, mask = prompt(len(images), length).clamp(max=VOCABULARY - 2), torch.ones(len(images), length).long()
    for row, count in enumerate(images):
        ids[row, length - 2 - 4 * count : length - 2] = VOCABULARY - 1
        mask[row, : length - 4 - 4 * count] = 0
    pixels = torch.randn(sum(images), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
