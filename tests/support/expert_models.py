"""Tiny mixtures of experts in float64, batches of replicas, and one process's step over all of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 37
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
_BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


def mixtral(layers: int, **changes: Any) -> MixtralForCausalLM:
    sizes = {**_SIZES, "num_local_experts": 4, "num_hidden_layers": layers, **changes}
    return MixtralForCausalLM(MixtralConfig(**sizes))


def balanced_mixtral(layers: int, **changes: Any) -> MixtralForCausalLM:
    """A mixture with the auxiliary loss of its routers."""
    return mixtral(layers, **_BALANCED, **changes)


def qwen3_moe(layers: int, **changes: Any) -> Qwen3MoeForCausalLM:
    sizes: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts": 4, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **sizes, num_hidden_layers=layers, **changes))


def olmoe(layers: int, **changes: Any) -> OlmoeForCausalLM:
    return OlmoeForCausalLM(OlmoeConfig(**_SIZES, **_BALANCED, num_experts=4, num_hidden_layers=layers, **changes))


def deepseek_v3(layers: int, **changes: Any) -> DeepseekV3ForCausalLM:
    """A dense layer, then shared experts next to routed ones in groups, chosen with a bias that has no loss."""
    latent: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    routed: dict[str, Any] = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12}
    others: dict[str, Any] = {"v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
    config = DeepseekV3Config(**_SIZES, **latent, **routed, **others, num_hidden_layers=layers, **changes)
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1)
    return model


MODELS: dict[str, Callable[..., Any]] = {
    "mixtral": mixtral,
    "six experts": partial(mixtral, num_local_experts=6),
    "balanced mixtral": balanced_mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "deepseek_v3": deepseek_v3,
}


def make(name: str, layers: int = 4, experts: str = "eager", **changes: Any) -> Any:
    """The model of that name in float64, with the same weights in every process; ``experts`` compute its experts."""
    torch.manual_seed(7)
    model = MODELS[name](layers, **changes).double()
    model.set_experts_implementation(experts)
    return model


def batch_of(replica: int, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens and labels ``(rows, 6 + replica)``: each replica brings another number of tokens."""
    generator = torch.Generator().manual_seed(100 * seed + replica)
    ids = torch.randint(1, VOCABULARY, (rows, 6 + replica), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def step_of_one_process(
    model: nn.Module, batches: Sequence[dict[str, torch.Tensor]], microbatches: int
) -> list[torch.Tensor]:
    """Add the gradients of the mean over replicas and microbatches; return the mean loss of each replica.

    transformers computes losses in float32, in which a third is rounded: the gradients are divided, in float64.
    """
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    means = []
    for batch in batches:
        losses = []
        for part in zip(*(value.chunk(microbatches) for value in batch.values()), strict=True):
            loss = model(**dict(zip(batch, part, strict=True))).loss
            (loss / microbatches).backward()
            losses.append(loss.detach())
        means.append(torch.stack(losses).mean())
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        if parameter.grad is not None:
            parameter.grad /= len(batches)
            parameter.grad += 0 if earlier is None else earlier
    return means
