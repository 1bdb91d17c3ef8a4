"""Transformer layers: declared by the model, or given by the user."""

from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp.tracing.modules.layers import find_layer_classes, layer_names
from tests.support.traced_models import PlainLayer, PlainModel, make_model


class Nested(nn.Module):
    """Layers inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(PlainLayer(), nn.Sequential(PlainLayer())) for _ in range(11))


def test_layers_by_class_name_and_list() -> None:
    """In the order of the model, not of the alphabet."""
    model = make_model("llama", layers=11)
    given: list[Any] = [None, LlamaDecoderLayer, "LlamaDecoderLayer", [GPT2Block, "LlamaDecoderLayer"]]
    for wanted in given:
        assert layer_names(model, find_layer_classes(model, wanted)) == [f"model.layers.{index}" for index in range(11)]


def test_only_the_outermost_layers_count() -> None:
    model = Nested()

    assert layer_names(model, (nn.Sequential,)) == [f"blocks.{index}" for index in range(11)]
    assert layer_names(model, (PlainLayer,))[:3] == ["blocks.0.0", "blocks.0.1.0", "blocks.1.0"]


def test_a_model_inside_a_module_declares_its_layers() -> None:
    module = nn.ModuleDict({"heads": nn.ModuleList(PlainLayer() for _ in range(9))})
    module["inner"] = nn.ModuleDict({"llama": make_model("llama", layers=2), "bert": make_model("bert", layers=2)})

    assert [cls.__name__ for cls in find_layer_classes(module, None)] == ["LlamaDecoderLayer", "BertLayer"]


class Expert(PlainLayer):
    """One of several in a layer."""


class Mixture(nn.Module):
    """A layer with more experts than the model has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(8))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (PlainModel(), PlainLayer),
        (nn.ModuleDict({"h": nn.ModuleList(Mixture() for _ in range(3))}), Mixture),
        (nn.ModuleList([*(nn.Linear(4, 4) for _ in range(6)), PlainLayer(), PlainLayer()]), PlainLayer),
        (nn.ModuleList(checkpoint_wrapper(PlainLayer()) for _ in range(2)), PlainLayer),
        # Four lists of two, as in a residual network, are longer than one of three.
        (
            nn.ModuleDict(
                {
                    **{str(i): nn.Sequential(PlainLayer(), PlainLayer()) for i in range(4)},
                    "other": nn.ModuleList(Expert() for _ in range(3)),
                }
            ),
            PlainLayer,
        ),
    ],
)
def test_the_longest_run_of_equal_modules_is_taken_and_said(
    module: nn.Module, expected: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    assert find_layer_classes(module, None) == (expected,)

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{expected.__name__} in " in record.message
    assert "pass transformer_layer_cls for other layers" in record.message


def test_a_name_of_another_library_is_told_the_layers_of_this_model() -> None:
    with pytest.raises(ValueError, match=r"'LlamaBlock' .did you mean 'LlamaDecoderLayer'.*LlamaModel"):
        find_layer_classes(make_model("llama"), "LlamaBlock")
    with pytest.raises(ValueError, match=r"'LlamaModell' .did you mean 'LlamaModel'"):
        find_layer_classes(make_model("llama"), "LlamaModell")
