"""A Llama of few numbers, as all tests on XLA ranks train it: each of its graphs compiles in a second."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.devices.kinds import device_of

MICROBATCHES = 4


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


def gradients_of_one_process(model: nn.Module, ids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """Return each gradient of a process alone that accumulates the microbatches of ``ids`` on ``device``."""
    model.to(device)
    for part in ids.chunk(MICROBATCHES):
        part = part.to(device)
        (model(input_ids=part, labels=part).loss / MICROBATCHES).backward()
        device_of(device).submit()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
