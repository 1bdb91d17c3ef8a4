"""Tiny models of the tests on XLA devices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp.devices.kinds import device_of
from tests.support.models import microbatches
from tests.support.xla_process import on_device, placed

VOCABULARY = 64
MICROBATCHES = 4


def llama(**options: Any) -> LlamaForCausalLM:
    """Return a Llama of 4 layers, with the initial weights of seed 0."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**options))


def llama_config(**options: Any) -> LlamaConfig:
    """Return the configuration of ``llama``."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{"vocab_size": VOCABULARY, **sizes, **heads, **options})


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 of 2 layers with dropout and tied weights, with the initial weights of seed 0."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**{"vocab_size": VOCABULARY, **sizes, **options}))


def layer_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of the layers of ``llama`` or ``gpt2``."""
    return GPT2Block if isinstance(model, GPT2LMHeadModel) else LlamaDecoderLayer


def batch(step: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """Return the inputs of a step, ``(rows, 8)``."""
    ids = torch.randint(0, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def tiny_llama(layers: int, **settings: Any) -> LlamaForCausalLM:
    """Return a Llama with the same weights in each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    return LlamaForCausalLM(config)


def tokens(step: int, batch: int = 8, length: int = 16) -> torch.Tensor:
    """Return the token numbers (B, T) of a step."""
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(step))


def gradients_of_one_process(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return each gradient of a process alone that accumulates the microbatches of ``inputs`` on ``device``."""
    placed(model, device).config.use_cache = False
    for part in microbatches(dict(inputs), MICROBATCHES):
        (model(**on_device(part, device)).loss / MICROBATCHES).backward()
        device_of(device).submit()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


def t5() -> T5ForConditionalGeneration:
    """Return a T5 of two layers in each half, without dropout, with the same weights in each call."""
    torch.manual_seed(1234)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)
