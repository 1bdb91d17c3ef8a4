"""Tiny models of the tests on XLA devices."""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCABULARY = 64


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
