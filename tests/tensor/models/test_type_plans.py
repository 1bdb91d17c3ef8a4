"""Classes of the types whose plans ship with nxdpp, compared with one process."""

import inspect
from importlib import import_module
from typing import Any

import torch
import transformers

from nxdpp import check_tensor_parallel, parallel_state
from nxdpp.tensor.models.type_plans import PLANS
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
_BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
}
_GPT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", _ENCODER | {"embedding_size": 16, "num_hidden_groups": 2}),
    "bart": ("BartConfig", _BOTH | {"scale_embedding": True}),
    "bert": ("BertConfig", _ENCODER),
    "blenderbot": ("BlenderbotConfig", _BOTH),
    "blenderbot-small": ("BlenderbotSmallConfig", _BOTH),
    "electra": ("ElectraConfig", _ENCODER | {"embedding_size": 16}),
    "gpt2": ("GPT2Config", _GPT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt_neo": (
        "GPTNeoConfig",
        _GPT
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"max_position_embeddings": 16, "window_size": 4},
    ),
    "gptj": ("GPTJConfig", _GPT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "rotary_dim": 4}),
    "roberta": ("RobertaConfig", _ENCODER | {"max_position_embeddings": 32}),
    "t5": (
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    ),
}
_WITH_LABELS = ("MaskedLM", "CausalLM", "LMHeadModel", "ConditionalGeneration")


def _classes(model_type: str) -> list[type[Any]]:
    name = model_type.replace("-", "_")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    return [
        each
        for name in module.__all__
        if issubclass(each := getattr(module, name), transformers.PreTrainedModel)
        and not name.endswith(("PreTrainedModel", "PretrainedModel"))
        and not name.startswith("Pretrained")
    ]


def _inputs(kind: type[Any], length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    # Classification takes the state of the last end token, of which each row has one.
    ids[:, -1] = 1
    mask = torch.ones_like(ids)
    if length > 8:
        mask[1, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind.__name__.endswith(_WITH_LABELS):
        inputs["labels"] = ids
    elif "decoder_input_ids" in inspect.signature(kind.forward).parameters:
        inputs["decoder_input_ids"] = ids
    if "Choice" in kind.__name__ or "Double" in kind.__name__:
        inputs = {name: value[:, None].repeat(1, 2, 1) for name, value in inputs.items()}
    return inputs


def _model(kind: type[Any], config: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    is_decoder = kind.__name__.endswith(("CausalLM", "LMHeadModel"))
    model = kind(getattr(transformers, config)(**({"is_decoder": is_decoder} | sizes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            # Biases of zero would hide one that is added twice.
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _differences(rank: int) -> dict[str, float]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    found = {}
    for model_type, (config, sizes) in CONFIGURATIONS.items():
        kinds = _classes(model_type)
        # The base, a head with labels, and the last of the others.
        labelled = next(kind for kind in kinds if kind.__name__.endswith(_WITH_LABELS))
        for kind in dict.fromkeys([kinds[0], kinds[-1], labelled]):
            model = _model(kind, config, sizes)
            found[f"{kind.__name__} 12"] = check_tensor_parallel(model, _inputs(kind, 12))[0]
    for model_type, kind in (("bert", transformers.BertLMHeadModel), ("gpt2", transformers.GPT2LMHeadModel)):
        config, sizes = CONFIGURATIONS[model_type]
        model = _model(kind, config, sizes | {"is_decoder": True, "add_cross_attention": True})
        states = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
        inputs = _inputs(kind, 12) | {"encoder_hidden_states": states}
        found[f"{kind.__name__} of an encoder"] = check_tensor_parallel(model, inputs)[0]
    return found


def test_each_type_is_compared() -> None:
    assert CONFIGURATIONS.keys() == PLANS.keys()


def test_classes_of_each_type_equal_one_process() -> None:
    for found in run_ranks(2, _differences):
        assert len(found) > 25
        for name, distance in found.items():
            assert distance < 1e-12, name
