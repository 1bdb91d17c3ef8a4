"""Transformer layers: declared by the model, or given by the user."""

from typing import Any

import pytest
import transformers
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp.tracing.layers import find_layer_classes, layer_names, resolve_classes
from tests.support.traced_models import ARCHITECTURES, PlainLayer, PlainModel, make_model

DECLARED = {
    "llama": "LlamaDecoderLayer",
    "gpt2": "GPT2Block",
    "qwen3": "Qwen3DecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "bert": "BertLayer",
    "bert_classifier": "BertLayer",
}


class OtherLayer(PlainLayer):
    """A class without instances."""


class Nested(nn.Module):
    """Layers inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(PlainLayer(), nn.Sequential(PlainLayer())) for _ in range(11))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_hugging_face_model_declares_its_layers(architecture: str) -> None:
    model = make_model(architecture, layers=2) if architecture != "bert_classifier" else make_model(architecture)

    classes = find_layer_classes(model, None)

    assert [cls.__name__ for cls in classes] == [DECLARED[architecture]]


@pytest.mark.parametrize(
    "wanted",
    [
        LlamaDecoderLayer,
        "LlamaDecoderLayer",
        [LlamaDecoderLayer],
        ("LlamaDecoderLayer",),
        ["LlamaDecoderLayer", LlamaDecoderLayer],
        [GPT2Block, "LlamaDecoderLayer"],
    ],
)
def test_layers_by_class_name_and_list(wanted: Any) -> None:
    model = make_model("llama", layers=3)

    assert layer_names(model, find_layer_classes(model, wanted)) == [
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
    ]


def test_names_are_in_the_order_of_the_model_not_of_the_alphabet() -> None:
    names = layer_names(make_model("llama", layers=12), (LlamaDecoderLayer,))

    assert names == [f"model.layers.{index}" for index in range(12)]


def test_only_the_outermost_layers_count() -> None:
    model = Nested()

    assert layer_names(model, (nn.Sequential,)) == [f"blocks.{index}" for index in range(11)]
    assert layer_names(model, (PlainLayer,))[:3] == ["blocks.0.0", "blocks.0.1.0", "blocks.1.0"]


def test_a_plain_model_needs_transformer_layer_cls() -> None:
    with pytest.raises(ValueError, match=r"PlainModel does not declare.*Pass transformer_layer_cls.*PlainLayer"):
        find_layer_classes(PlainModel(), None)


def test_checkpointing_layers_if_no_listed_class_is_declared() -> None:
    model = make_model("llama", layers=2)
    for declared in ({"LlamaRotaryEmbedding"}, set(), None):
        model._no_split_modules = declared

        assert [cls.__name__ for cls in find_layer_classes(model, None)] == ["LlamaDecoderLayer"]


def test_declared_layers_that_stand_in_no_list() -> None:
    config = transformers.MPNetConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.MPNetForMaskedLM(config)
    model._no_split_modules = ["MPNetEmbeddings"]

    with pytest.raises(ValueError, match=r"_no_split_modules=\['MPNetEmbeddings'\].*hold: MPNetLayer\."):
        find_layer_classes(model, None)


def test_the_message_for_a_list_of_lists_names_the_inner_classes() -> None:
    module = nn.ModuleList(nn.ModuleList(PlainLayer() for _ in range(2)) for _ in range(2))

    with pytest.raises(ValueError, match=r"hold: PlainLayer\."):
        find_layer_classes(module, None)


def test_a_declared_embedding_is_no_layer() -> None:
    model = make_model("bert", layers=2)
    model._no_split_modules = ["BertEmbeddings", "BertLayer"]

    assert [cls.__name__ for cls in find_layer_classes(model, None)] == ["BertLayer"]


def test_the_message_for_an_unknown_class_name_lists_the_classes() -> None:
    with pytest.raises(ValueError, match=r"transformer_layer_cls: no module of PlainModel.*'LamaLayer'.*PlainLayer"):
        find_layer_classes(PlainModel(), "LamaLayer")


def test_the_message_for_a_class_without_instances_lists_the_classes() -> None:
    with pytest.raises(ValueError, match=r"transformer_layer_cls=OtherLayer: PlainModel has no.*hold: PlainLayer"):
        find_layer_classes(PlainModel(), OtherLayer)


@pytest.mark.parametrize("wanted", [3, [3], PlainModel(), object, [int]])
def test_an_argument_that_is_not_a_class_is_refused(wanted: Any) -> None:
    with pytest.raises(TypeError, match="leaf_module_cls takes module classes and class names"):
        resolve_classes(PlainModel(), wanted if isinstance(wanted, list) else [wanted], "leaf_module_cls")


def test_classes_from_classes_and_names_are_each_there_once() -> None:
    assert resolve_classes(PlainModel(), ["Linear", PlainLayer, nn.Linear], "leaf_module_cls") == (
        nn.Linear,
        PlainLayer,
    )
    assert resolve_classes(PlainModel(), (), "leaf_module_cls") == ()
