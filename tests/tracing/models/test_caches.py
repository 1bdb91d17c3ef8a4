"""Key-value caches that the spine fills before the layers run."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tests.support.traced_models import make_inputs, make_model, run_graph, trace_with
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


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": make_inputs("llama")["input_ids"]}


def test_each_layer_gets_its_part_of_a_filled_cache() -> None:
    model = Prefixed(3)
    expected = model(**tokens())

    traced = trace_with(model, tokens())
    output = run_graph(model, traced, tokens())

    assert torch.equal(output.logits, expected.logits)
    assert not torch.equal(output.logits, model.module(**tokens()).logits)
    assert output.past_key_values is None
    # A second run begins with the prefixes again.
    assert torch.equal(run_graph(model, traced, tokens()).logits, expected.logits)


def test_a_layer_that_reads_the_part_of_another_one_is_refused() -> None:
    model = Prefixed(2)
    traced = trace_with(model, tokens())
    model.module.model.layers[1].self_attn.layer_idx = 0

    with pytest.raises(RuntimeError, match="part of a key-value cache that belongs to another layer"):
        run_graph(model, traced, tokens())
