"""Tiny models that PEFT adapts, with random values in every adapter."""

from collections.abc import Callable
from typing import Any

import peft
import torch
from transformers import (
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
)
from transformers import T5ForConditionalGeneration as T5

from tests.support.wrapped_models import LAYERS, SIZES, TOKENS, WIDTH, bert, initialised, llama

_ATTENTION = ["q_proj", "v_proj"]
_CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
_LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}


def _llama() -> Any:
    return LlamaForCausalLM(llama())


def _mixtral() -> Any:
    sizes: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": True}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **TOKENS, **sizes))


def _gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _bert() -> Any:
    return BertForSequenceClassification(bert())


def _t5() -> Any:
    sizes: dict[str, Any] = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    special: dict[str, Any] = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5(T5Config(**sizes, **TOKENS, **special))


Make = Callable[[], Any]
ADAPTERS: dict[str, tuple[Make, Make]] = {
    "lora": (_llama, lambda: peft.LoraConfig(**_CAUSAL, **_LORA, target_modules=_ATTENTION)),
    "lora without a task": (_llama, lambda: peft.LoraConfig(**_LORA, target_modules=_ATTENTION)),
    "dora": (_llama, lambda: peft.LoraConfig(**_CAUSAL, **_LORA, target_modules=_ATTENTION, use_dora=True)),
    "lora of embeddings": (
        _llama,
        lambda: peft.LoraConfig(**_CAUSAL, **_LORA, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    ),
    "modules to save": (
        _llama,
        lambda: peft.LoraConfig(
            **_CAUSAL, **_LORA, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
        ),
    ),
    "ia3": (
        _llama,
        lambda: peft.IA3Config(
            **_CAUSAL, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "vera": (_llama, lambda: peft.VeraConfig(**_CAUSAL, r=4, target_modules=_ATTENTION)),
    # The experts are two parameters.
    "lora of experts": (
        _mixtral,
        lambda: peft.LoraConfig(
            **_CAUSAL,
            **_LORA,
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
    ),
    "lora of gpt2": (
        _gpt2,
        lambda: peft.LoraConfig(**_CAUSAL, **_LORA, target_modules=["c_attn"], fan_in_fan_out=True),
    ),
    "lora of bert": (
        _bert,
        lambda: peft.LoraConfig(task_type="SEQ_CLS", **_LORA, target_modules=["query", "value"]),
    ),
    "lora of t5": (_t5, lambda: peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **_LORA, target_modules=["q", "v"])),
}
_TOKENS: dict[str, Any] = {"num_virtual_tokens": 4}
PROMPTS: dict[str, tuple[Make, Make]] = {
    "prompt": (_llama, lambda: peft.PromptTuningConfig(**_CAUSAL, **_TOKENS)),
    "prompt of gpt2": (_gpt2, lambda: peft.PromptTuningConfig(**_CAUSAL, **_TOKENS)),
    "prompt of t5": (_t5, lambda: peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", **_TOKENS)),
    "prompt of bert": (_bert, lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", **_TOKENS)),
    "p-tuning": (_llama, lambda: peft.PromptEncoderConfig(**_CAUSAL, **_TOKENS, encoder_hidden_size=16)),
}
PREFIXES: dict[str, tuple[Make, Make]] = {
    "prefix": (_llama, lambda: peft.PrefixTuningConfig(**_CAUSAL, **_TOKENS)),
    "projected prefix": (
        _llama,
        lambda: peft.PrefixTuningConfig(**_CAUSAL, **_TOKENS, prefix_projection=True, encoder_hidden_size=16),
    ),
    "prefix of gpt2": (_gpt2, lambda: peft.PrefixTuningConfig(**_CAUSAL, **_TOKENS)),
    "prefix of t5": (_t5, lambda: peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", **_TOKENS)),
}
_ALL = PREFIXES | ADAPTERS | PROMPTS


def base(name: str, seed: int = 1) -> Any:
    """The model that ``adapted(name)`` adapts, with weights from ``seed``."""
    return initialised(_ALL[name][0](), seed)


def adapted(name: str, seed: int = 3) -> Any:
    """An adapted model, whose trained tensors have random values from ``seed``."""
    model = peft.get_peft_model(base(name), _ALL[name][1]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def inputs_for(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``batch`` with the labels of the model's task."""
    if name.endswith("bert"):
        return {**batch, "labels": torch.arange(len(batch["input_ids"])) % 2}
    return batch
