"""Probes of the private names of transformers and accelerate."""

import inspect
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from transformers import Gemma4TextModel, GenerationConfig, LlamaConfig, LlamaForCausalLM

from nxdpp.ground import transformers_names as names
from tests.ground.probe import probe


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    )


@probe(names.INIT_WEIGHTS, names.IS_INITIALIZED)
def _init_weights() -> bool:
    model = _llama()
    head, projection = model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight
    for weight in (head, projection):
        torch.nn.init.zeros_(weight)
    setattr(head, names.IS_INITIALIZED.name, True)
    for module in (model.lm_head, model.model.layers[0].mlp.up_proj):
        names.INIT_WEIGHTS.of(model)(module)
    return not head.any() and bool(projection.any())


@probe(names.IGNORED_ON_SAVE, names.ADJUST_KEYS)
def _keys() -> bool:
    model = _llama()
    found = SimpleNamespace(missing_keys={"a"}, unexpected_keys={"model.layers.0.self_attn.rotary_emb.inv_freq", "b"})
    names.ADJUST_KEYS.of(model)(found)
    return names.IGNORED_ON_SAVE.held_by(model) and "b" in found.unexpected_keys and "a" in found.missing_keys


@probe(names.UNSPLIT)
def _unsplit() -> bool:
    return "LlamaDecoderLayer" in names.UNSPLIT.of(_llama())


@probe(names.SLICE_INPUTS)
def _slice_inputs() -> bool:
    return "logits_to_keep" in inspect.signature(names.SLICE_INPUTS.of(Gemma4TextModel)).parameters


@probe(names.COLLECTOR)
def _collector() -> bool:
    model, collected = _llama(), {"hidden_states": list[torch.Tensor]()}
    model.model.layers[0].register_forward_pre_hook(lambda *_: names.COLLECTOR.found.set(collected) and None)
    model(torch.tensor([[1]]), output_hidden_states=True)
    return len(collected["hidden_states"]) == 2


@probe(names.CONVERSIONS)
def _conversions() -> bool:
    with TemporaryDirectory() as folder:
        _llama().save_pretrained(folder)
        return names.CONVERSIONS.of(LlamaForCausalLM.from_pretrained(folder)) is not None


@probe(names.REORDER_CACHE)
def _reorder_cache() -> bool:
    return callable(names.REORDER_CACHE.found) and not names.REORDER_CACHE.held_by(LlamaForCausalLM)


@probe(names.CACHE_LENGTH)
def _cache_length() -> bool:
    model = _llama()
    model.generate(torch.tensor([[1]]), max_new_tokens=2, cache_implementation="static", disable_compile=True)
    return bool(names.CACHE_LENGTH.of(model) >= 2)


@probe(names.DATA_LOADERS)
def _data_loaders() -> bool:
    return bool(names.DATA_LOADERS.of(Accelerator(cpu=True)) == [])


class _Loader:
    end_of_dataloader, remainder = True, 3


@probe(names.BEGIN_LOADER, names.END_LOADER)
def _loaders() -> bool:
    state, loader = GradientState(), _Loader()
    names.BEGIN_LOADER.of(state)(loader)
    told = state.active_dataloader is loader and state.end_of_dataloader and state.remainder == 3
    names.END_LOADER.of(state)(loader)
    return told and state.active_dataloader is None


@probe(names.FROM_MODEL_CONFIG, names.DEFAULT_SETTINGS)
def _generation() -> bool:
    config = GenerationConfig()
    names.FROM_MODEL_CONFIG.set(config, False)
    return bool(names.DEFAULT_SETTINGS.of(config)()["num_beams"] == 1)


@probe(names.TP_PLAN, names.EXPERTS)
def _plans() -> bool:
    model = _llama()
    names.EXPERTS.set(model.config, "eager")
    is_set = names.EXPERTS.of(model.config) == "eager"
    return bool(is_set and names.TP_PLAN.of(model)["model.layers.*.mlp.up_proj"] == "colwise")


@probe(names.GAUSSIAN_TOPK)
def _gaussian_topk() -> bool:
    layer = names.GAUSSIAN_TOPK.found
    return list(inspect.signature(layer).parameters) == ["self", "inputs"]
