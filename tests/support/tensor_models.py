"""Small transformers models over tensor-parallel ranks, compared with one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from nxdpp.initialization.parts import own_part

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of two layers, with two query heads for each key and value head."""
    return LlamaForCausalLM(LlamaConfig(**(_SIZES | changes)))


def experts() -> Qwen3MoeForCausalLM:
    """A model with experts, and with norms of queries and keys."""
    sizes = _SIZES | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """A Mixtral of four experts."""
    return MixtralForCausalLM(MixtralConfig(**(_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes)))


def gpt2(layers: int = 2) -> GPT2LMHeadModel:
    """A GPT-2: a fused query, key and value, and a tied head."""
    changes: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=16, **changes)
    )


def bert() -> BertForMaskedLM:
    """A BERT: a tied head whose bias is a parameter of two modules."""
    changes: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**(sizes | changes)))


def t5() -> T5ForConditionalGeneration:
    """A T5: a position bias for each head, and attention to the encoder."""
    changes: dict[str, Any] = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **changes))


MODELS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "experts": experts,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
}


def make(name: str, seed: int = 0, **changes: Any) -> Any:
    """The model of that name, with the same weights in every process."""
    torch.manual_seed(seed)
    return MODELS[name](**changes)


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    """Tokens and labels ``(rows, 8)``; some labels are ignored."""
    ids = torch.randint(VOCABULARY - 1, (rows, 8), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, 5] = -100
    return {"input_ids": ids, "labels": labels}


def gradient_distance(parameters: dict[str, nn.Parameter], whole: nn.Module) -> float:
    """Greatest difference of a part's gradient, as a share of the greatest value of the whole gradient.

    The share is of a thousandth of the greatest gradient of all at least: a key's bias has only rounding.
    """
    worst = 0.0
    least = max(float(each.grad.abs().max()) for each in whole.parameters() if each.grad is not None) / 1000
    for name, parameter in parameters.items():
        theirs = whole.get_parameter(name).grad
        assert theirs is not None
        assert parameter.grad is not None
        difference = (parameter.grad - own_part(theirs, parameter)).abs().max()
        worst = max(worst, float(difference) / max(least, float(theirs.abs().max())))
    return worst


def differing(parameters: dict[str, nn.Parameter], whole: nn.Module) -> list[str]:
    """Names of parameters that are not this rank's part of those in ``whole``, bit for bit."""
    return [
        name
        for name, parameter in parameters.items()
        if not torch.equal(own_part(whole.get_parameter(name).detach(), parameter).cpu(), parameter.cpu())
    ]
