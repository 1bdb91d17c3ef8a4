"""Tiny Hugging Face models, a padded batch, and the training of one process."""

import copy
from collections.abc import Callable, Mapping
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
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(layers: int = 4, **changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**_SHARED, "num_hidden_layers": layers, **changes}))


def tied_llama(layers: int = 4) -> LlamaForCausalLM:
    return llama(layers, tie_word_embeddings=True)


def gpt2(layers: int = 4, dropout: float = 0.0) -> GPT2LMHeadModel:
    rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=layers, bos_token_id=1, eos_token_id=2, **rates)
    )


def qwen3(layers: int = 4) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**_SHARED, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8))


def mixtral(layers: int = 4) -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(**_SHARED, num_hidden_layers=layers, num_key_value_heads=2, num_local_experts=4)
    )


def bert(layers: int = 4, dropout: float = 0.0) -> BertForMaskedLM:
    rates: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForMaskedLM(BertConfig(**{**_SHARED, **rates}, num_hidden_layers=layers))


MODELS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "tied_llama": tied_llama,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "bert": bert,
}


def make(name: str, **changes: Any) -> Any:
    """The model of that name, with the same weights in every process."""
    torch.manual_seed(1234)
    return MODELS[name](**changes)


def padded_batch(size: int, length: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens (size, length), a mask that pads every other sequence differently, and labels without the padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(0, size, 2):
        mask[row, length - 1 - row % (length // 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def microbatches(inputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The inputs of each microbatch; all inputs are tensors of the whole batch."""
    return [{name: value.chunk(count)[i] for name, value in inputs.items()} for i in range(count)]


def train_in_one_process(model: nn.Module, inputs: Mapping[str, Any], count: int) -> list[torch.Tensor]:
    """Accumulate the gradients of the mean loss of ``count`` microbatches; return the losses."""
    losses = []
    for microbatch in microbatches(inputs, count):
        loss = model(**microbatch).loss
        # As torch advises, and a step does.
        with torch.autocast(loss.device.type, enabled=False):
            (loss / count).backward()
        losses.append(loss.detach())
    return losses


def reference(model: Any) -> Any:
    """A copy that stays whole, without a key-value cache, as in a training loop."""
    twin = copy.deepcopy(model)
    if hasattr(twin, "config"):
        twin.config.use_cache = False
    return twin


def gradient_differences(wrapped: Any, whole: nn.Module) -> dict[str, float | None]:
    """Relative distance of each gradient on this rank that is not bit for bit that of one process.

    ``None`` if only one of the two models has the gradient.
    """
    expected = dict(whole.named_parameters(remove_duplicate=False))
    differences: dict[str, float | None] = {}
    for name, parameter in wrapped.local_named_parameters():
        ours, theirs = parameter.grad, expected[name].grad
        if ours is None or theirs is None:
            if ours is not theirs:
                differences[name] = None
        elif not torch.equal(ours, theirs):
            differences[name] = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return differences
