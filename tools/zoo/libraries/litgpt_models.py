"""litgpt: its GPT in the configurations of several families."""

from functools import partial
from typing import Any

from litgpt import GPT, Config
from torch import nn

from tools.zoo.libraries.case import Case, NextToken, tokens

_SIZES = {"n_layer": 4, "n_embd": 32, "n_head": 2, "block_size": 32, "padded_vocab_size": 64, "vocab_size": 64}
_MLP = {"intermediate_size": 64}


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    return NextToken(GPT(Config.from_name(name, **(_SIZES | settings))))


def _case(name: str, **settings: Any) -> Case:
    return Case(partial(_build, name, settings), tokens(), "Block")


_GROUPED = {"n_query_groups": 1, **_MLP, "head_size": 16}
CASES = {
    "Pythia": _case("pythia-14m"),
    "Llama 2": _case("Llama-2-7b-hf", **_MLP),
    "Llama 3": _case("Llama-3-8B", **_GROUPED),
    "TinyLlama": _case("tiny-llama-1.1b", **_GROUPED),
    "Mistral": _case("Mistral-7B-v0.1", **_GROUPED),
    "Mixtral": _case("Mixtral-8x7B-v0.1", **_GROUPED, n_expert=4, moe_intermediate_size=64),
    "Falcon": _case("falcon-7b", n_query_groups=1, head_size=16),
    "StableLM": _case("stablelm-base-alpha-3b"),
    "phi-2": _case("phi-2", intermediate_size=64),
    "phi-3": _case("Phi-3-mini-4k-instruct", **_MLP),
    "Gemma": _case("Gemma-2b", **_GROUPED),
    "Gemma 2": _case("Gemma-2-2b", **_GROUPED, sliding_window_size=8),
    "Gemma 3": _case("Gemma-3-1b-it", **_GROUPED, sliding_window_size=8, sliding_window_indices=[1, 0, 1, 0]),
    "Qwen2.5": _case("Qwen2.5-0.5B", **_GROUPED),
    "Qwen3": _case("Qwen3-0.6B", **_GROUPED),
    "OLMo": _case("OLMo-1B-hf", **_MLP),
    "CodeLlama": _case("CodeLlama-7b-hf", **_MLP),
    "SmolLM2": _case("SmolLM2-135M", **_GROUPED),
}
