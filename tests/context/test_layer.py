"""Layers that mix tokens by other means than attention: their modules see whole sequences, or they are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from nxdpp import NxDPPModel, context_parallelize, parallel_state
from nxdpp.tensor.models.comparison import Float64
from tests.context.test_steps import LIMIT, batch_of
from tests.support.run_ranks import run_ranks

_SIZES: dict[str, Any] = {"vocab_size": 38, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


class _Shift(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(self.up_proj(x)) + x.roll(1, dims=1)
        return mixed


class _Sum(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(self.up_proj(x)) + 0.1 * x.cumsum(dim=1)
        return mixed


class _OwnAttention(LlamaAttention):
    """Attention in its own code, with positions of the whole sequence."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        cos, _ = kwargs["position_embeddings"]
        query = self.q_proj(hidden_states) * cos.repeat(1, 1, 4)
        scores = (query @ hidden_states.transpose(1, 2)).tril()
        return self.o_proj(scores.softmax(-1) @ hidden_states), None


class _NoAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self.o_proj(hidden_states), None


_REPLACED: dict[str, tuple[str, type[nn.Module]]] = {
    "shift": ("mlp", _Shift),
    "sum": ("mlp", _Sum),
    "own attention": ("self_attn", _OwnAttention),
    "no attention": ("self_attn", _NoAttention),
}


def _step(rank: int, case: str) -> dict[str, float]:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**_SIZES, num_key_value_heads=2, num_hidden_layers=2, use_cache=False)
    ).double()
    name, kind = _REPLACED[case]
    for layer in model.model.layers:
        layer.get_submodule(name).__class__ = kind
    alone = copy.deepcopy(model)
    batch = batch_of(0, 15)
    batch.pop("attention_mask")
    wrapped = NxDPPModel(context_parallelize(model), num_microbatches=2)
    with Float64():
        wrapped.run_train(**batch)
        for index in range(2):
            (alone(**{name: value.chunk(2)[index] for name, value in batch.items()}).loss / 2).backward()
    expected = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    found = {name: each.grad for name, each in wrapped.local_named_parameters() if each.grad is not None}
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in found}
    return {name: value for name, value in apart.items() if not value <= LIMIT}


@pytest.mark.parametrize("case", ["own attention", "no attention"])
def test_a_module_that_mixes_tokens_in_its_own_code_is_given_whole_sequences(case: str) -> None:
    assert run_ranks(2, _step, case) == [{}, {}]


@pytest.mark.parametrize("case", ["shift", "sum"])
def test_a_layer_that_mixes_tokens_elsewhere_is_refused(case: str) -> None:
    reason = "its outputs depend on the order of tokens, without attention"
    text = "ValueError: LlamaDecoderLayer mixes the tokens of a sequence by other means than attention: "
    with pytest.raises(AssertionError, match=text + reason):
        run_ranks(2, _step, case)
