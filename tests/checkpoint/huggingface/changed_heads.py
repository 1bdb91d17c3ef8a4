"""Pairs of transformers models of one type, of which one loads the checkpoint of the other."""

from collections.abc import Callable
from typing import Any

import transformers

from tests.support.wrapped_models import SIZES, TOKENS


def sized(name: str, **changes: Any) -> Callable[..., Any]:
    """A configuration of class ``name`` with the fields of most text models."""
    kept = {**SIZES, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return lambda: getattr(transformers, name)(**{**kept, **changes})


def images(name: str) -> Callable[..., Any]:
    """A configuration of class ``name`` for images of 16 x 16 pixels."""
    sizes = {key: value for key, value in SIZES.items() if "prob" not in key}
    return lambda: getattr(transformers, name)(**sizes, image_size=16, patch_size=4)


def seq2seq(name: str, **changes: Any) -> Callable[..., Any]:
    """A configuration of class ``name`` for an encoder and a decoder."""
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    return lambda: getattr(transformers, name)(**{**sizes, **changes})


def speech() -> Any:
    """A configuration with a convolution of normalised weights."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    convolutions: dict[str, Any] = {"conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
    positions: dict[str, Any] = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
    return transformers.Wav2Vec2Config(**sizes, **convolutions, **positions, intermediate_size=48)


# Other types of models: the class that is saved, the class that is loaded, and their configuration.
OTHERS: list[tuple[str, str, Callable[..., Any]]] = [
    ("RobertaModel", "RobertaForMaskedLM", sized("RobertaConfig")),
    ("RobertaForMaskedLM", "RobertaForQuestionAnswering", sized("RobertaConfig")),
    ("ElectraForPreTraining", "ElectraForMaskedLM", sized("ElectraConfig", embedding_size=16)),
    ("DebertaV2Model", "DebertaV2ForSequenceClassification", sized("DebertaV2Config")),
    ("XLMRobertaForMaskedLM", "XLMRobertaForTokenClassification", sized("XLMRobertaConfig")),
    ("MPNetModel", "MPNetForSequenceClassification", sized("MPNetConfig")),
    ("ModernBertModel", "ModernBertForMaskedLM", sized("ModernBertConfig", cls_token_id=1, sep_token_id=2)),
    ("MistralForCausalLM", "MistralForSequenceClassification", sized("MistralConfig")),
    ("Qwen2ForCausalLM", "Qwen2ForTokenClassification", sized("Qwen2Config")),
    ("Qwen3MoeModel", "Qwen3MoeForCausalLM", sized("Qwen3MoeConfig", num_experts=4, moe_intermediate_size=16)),
    ("Phi3Model", "Phi3ForCausalLM", sized("Phi3Config")),
    ("PhiForCausalLM", "PhiForSequenceClassification", sized("PhiConfig")),
    ("GPTNeoXModel", "GPTNeoXForCausalLM", sized("GPTNeoXConfig")),
    ("BloomModel", "BloomForSequenceClassification", sized("BloomConfig", n_layer=2, n_head=4)),
    ("BartForConditionalGeneration", "BartForCausalLM", seq2seq("BartConfig")),
    ("ViTForMaskedImageModeling", "ViTForImageClassification", images("ViTConfig")),
    ("BeitModel", "BeitForImageClassification", images("BeitConfig")),
    ("DeiTModel", "DeiTForImageClassification", images("DeiTConfig")),
    ("Dinov2Model", "Dinov2ForImageClassification", images("Dinov2Config")),
]
