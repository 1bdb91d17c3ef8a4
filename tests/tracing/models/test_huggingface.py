"""Hugging Face models are traced without changes to them."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

from nxdpp.tracing.graph.errors import TracingError
from tests.support.traced_models import ARCHITECTURES, make_inputs, make_model, run_graph, trace_with

LAYER_PREFIX = {
    "llama": "model.layers",
    "qwen3": "model.layers",
    "mixtral": "model.layers",
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "bert_classifier": "bert.encoder.layer",
}
VARIANTS = {
    "ids, mask": ("input_ids", "attention_mask"),
    "all": ("input_ids", "attention_mask", "labels", "position_ids"),
    "embeddings": ("inputs_embeds", "attention_mask", "labels"),
}


def _inputs(architecture: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    inputs = make_inputs(architecture)
    inputs["position_ids"] = torch.arange(1, 1 + inputs["input_ids"].size(1)).unsqueeze(0)
    inputs["inputs_embeds"] = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(2))
    return {name: inputs[name] for name in names}


@pytest.mark.parametrize(
    ("architecture", "names"),
    [("llama", names) for names in VARIANTS.values()]
    + [(architecture, VARIANTS["all"]) for architecture in ARCHITECTURES if architecture != "llama"],
)
def test_the_graph_computes_the_numbers_of_the_model(architecture: str, names: tuple[str, ...]) -> None:
    model = make_model(architecture)
    inputs = _inputs(architecture, names)

    traced = trace_with(model, inputs)
    output = run_graph(model, traced, inputs)

    assert traced.layers == tuple(f"{LAYER_PREFIX[architecture]}.{index}" for index in range(4))
    assert traced.inputs == names
    expected = model(**inputs)
    assert type(output) is type(expected)
    assert torch.equal(output.logits, expected.logits)
    if "labels" in names:
        assert torch.equal(output.loss, expected.loss)
    else:
        assert output.loss is None


@contextmanager
def _unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Fail if the model, its configuration or a replaced object is another object afterwards."""

    def state() -> dict[str, Any]:
        source = sys.modules[type(model).__module__]
        seen = {f"{name}.{key}": value for name, module in model.named_modules() for key, value in vars(module).items()}
        seen |= {f"global {key}": value for key, value in vars(source).items()}
        seen |= {f"torch.{key}": value for key, value in vars(torch).items()}
        seen |= {f"PreTrainedModel.{key}": value for key, value in vars(PreTrainedModel).items()}
        return seen

    before = state()
    parts = ("._modules", "._parameters", "._buffers")
    contents = {name: dict(value) for name, value in before.items() if name.endswith(parts)}
    configuration = copy.deepcopy(vars(model.config))
    try:
        yield
    finally:
        after = state()
        assert before.keys() == after.keys()
        assert [name for name in before if before[name] is not after[name]] == []
        for name, content in contents.items():
            assert after[name].keys() == content.keys(), name
            assert [key for key in content if after[name][key] is not content[key]] == [], name
        assert vars(model.config) == configuration


@pytest.mark.parametrize("architecture", ["mixtral", "bert"])
def test_nothing_is_changed_by_a_trace_that_fails(architecture: str) -> None:
    model = make_model(architecture)
    original: Any = type(model)

    def forward(self: PreTrainedModel, **inputs: Any) -> None:
        original.forward(self, **inputs)
        raise OverflowError("at the very end")

    model.__class__ = type("Failing", (original,), {"forward": forward, "__module__": original.__module__})

    with _unchanged(model), pytest.raises(TracingError, match="OverflowError: at the very end"):
        trace_with(model, make_inputs(architecture))


def test_a_cache_and_tuples_in_the_configuration_do_not_matter() -> None:
    model = make_model("mixtral", layers=2)
    inputs = make_inputs("mixtral")
    expected = model(**inputs)
    model.config.use_cache = True
    model.config.return_dict = False

    with _unchanged(model):
        output = run_graph(model, trace_with(model, inputs), inputs)

    assert isinstance(output, tuple)
    assert torch.equal(output[0], expected.loss)
    assert torch.equal(output[1], expected.logits)
    assert model.config.use_cache is True
    assert model.config.return_dict is False


def test_a_cache_is_refused_as_an_input() -> None:
    with pytest.raises(ValueError, match=r"use_cache=True.*Leave use_cache out"):
        trace_with(make_model("mixtral", layers=2), {**make_inputs("mixtral"), "use_cache": True})


def test_layers_dropped_at_random_are_refused() -> None:
    model = make_model("llama", layers=2)
    for rate in ("layerdrop", "encoder_layerdrop"):
        setattr(model.config, rate, 0.1)
        with pytest.raises(ValueError, match=rf"config\.{rate}=0\.1.*Set {rate}=0\.0"):
            trace_with(model, make_inputs("llama"))
        setattr(model.config, rate, 0.0)
