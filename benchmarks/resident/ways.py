"""Ways of a rank to obtain its materialised part of a model, and the models."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp import NxDPPModel

MICROBATCHES = 8
WRAP_RANKS = 16
"""Ranks that Llama-3.1-405B is cut for."""


@dataclass(frozen=True)
class Way:
    """``make`` takes a configuration and the folder of its weights.

    ``has_target``: the rank's own part bounds the memory it may take. ``in_turn``: ranks construct one after
    another. ``reads_weights``: the folder of weights must exist.
    """

    title: str
    make: Callable[[LlamaConfig, str], NxDPPModel]
    has_target: bool = True
    in_turn: bool = False
    reads_weights: bool = False


def owned_bytes(model: nn.Module) -> int:
    """Bytes of the storages of all parameters and buffers of ``model``; a shared storage counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta
    }
    return sum(storages.values())


def _llama_1b(tied: bool) -> LlamaConfig:
    """1.03 billion parameters, so that each of 4 ranks has about 1 GB of them in fp32."""
    return LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=20, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=tied,
    )  # fmt: skip


SIZES = {
    "1b": _llama_1b(tied=False),
    "1b-tied": _llama_1b(tied=True),
    # 76 million parameters, for --quick.
    "small": LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        max_position_embeddings=2048, tie_word_embeddings=False,
    ),
}  # fmt: skip
WITH_TARGETS = ("1b", "1b-tied")
"""For the small model already the imports exceed the limit."""


def _meta(config: LlamaConfig, _: str) -> NxDPPModel:
    wrapped = _wrap(_on_meta(config))
    wrapped.materialise()
    return wrapped


def _init_on_device(config: LlamaConfig, _: str) -> NxDPPModel:
    with nxdpp.init_on_device(torch.device("meta")):
        model = LlamaForCausalLM(config)
    wrapped = _wrap(model)
    wrapped.materialise()
    return wrapped


def _deferred_init(config: LlamaConfig, _: str) -> NxDPPModel:
    return _wrap(nxdpp.deferred_init(LlamaForCausalLM, config))


def _load_pretrained(config: LlamaConfig, weights: str) -> NxDPPModel:
    wrapped = _wrap(_on_meta(config))
    nxdpp.load_pretrained(wrapped, weights)
    return wrapped


def _save_pretrained(config: LlamaConfig, weights: str) -> NxDPPModel:
    wrapped = _load_pretrained(config, weights)
    nxdpp.save_pretrained(wrapped, f"{weights}/saved")
    return wrapped


def _eager(config: LlamaConfig, _: str) -> NxDPPModel:
    return _wrap(LlamaForCausalLM(config))


def _on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _wrap(model: LlamaForCausalLM) -> NxDPPModel:
    return NxDPPModel(model, num_microbatches=MICROBATCHES)


WAYS = {
    "meta": Way('torch.device("meta"), wrap, materialise', _meta),
    "init_on_device": Way("init_on_device, wrap, materialise", _init_on_device),
    "deferred_init": Way("deferred_init, wrap", _deferred_init),
    "load_pretrained": Way('torch.device("meta"), wrap, load_pretrained', _load_pretrained, reads_weights=True),
    "save_pretrained": Way("the same, then save_pretrained", _save_pretrained, reads_weights=True),
    "eager": Way("eager constructor, wrap; one rank at a time", _eager, has_target=False, in_turn=True),
}
