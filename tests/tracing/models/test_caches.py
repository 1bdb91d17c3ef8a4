"""Key-value caches that the spine hands to layers."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from nxdpp.tracing.graph.errors import TracingError
from tests.support.traced_models import make_inputs, make_model, trace_with
from tests.support.wrapped_models import PassesOn


class Prefixed(PassesOn):
    """Gives each layer learned keys and values of three tokens."""

    def __init__(self, layers: int) -> None:
        super().__init__(make_model("llama", layers=layers))
        generator = torch.Generator().manual_seed(1)
        config = self.module.config
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self.prefix = nn.Parameter(torch.randn(layers, 2, heads, 3, width, generator=generator))

    def forward(self, input_ids: torch.Tensor) -> Any:
        rows = input_ids.shape[0]
        parts = self.prefix.unsqueeze(2).expand(-1, -1, rows, -1, -1, -1).unbind(0)
        return self.module(input_ids, past_key_values=DynamicCache([part.unbind(0) for part in parts]))


class Unfilled(PassesOn):
    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.module(input_ids, past_key_values=DynamicCache())


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": make_inputs("llama")["input_ids"]}


def test_a_filled_cache_is_refused() -> None:
    with pytest.raises(TracingError, match=r"a DynamicCache is handed on[\s\S]*past_key_values=None[\s\S]*\n  at "):
        trace_with(Prefixed(2), tokens())


def test_a_cache_for_later_tokens_is_refused() -> None:
    model = Unfilled(make_model("llama", layers=2))

    with pytest.raises(TracingError, match=r"a pipeline has no cache\. Call the model with past_key_values=None"):
        trace_with(model, tokens())
