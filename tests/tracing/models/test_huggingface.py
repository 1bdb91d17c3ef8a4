"""Hugging Face models are traced without changes to them."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import (
    LlamaModel,
    PreTrainedModel,
    pytorch_utils,
)
from transformers.masking_utils import create_recurrent_attention_mask

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.models.huggingface import refuse_packed_positions
from tests.support.exact import assert_exact
from tests.support.traced_models import ARCHITECTURES, make_inputs, make_model, run_graph, trace_with
from tests.support.wrapped_models import PassesOn

LAYER_PREFIX = {
    "llama": "model.layers",
    "qwen3": "model.layers",
    "mixtral": "model.layers",
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "bert_classifier": "bert.encoder.layer",
}
VARIANTS = {
    "ids": ("input_ids",),
    "ids, mask": ("input_ids", "attention_mask"),
    "ids, labels": ("input_ids", "labels"),
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


@pytest.mark.parametrize("architecture", ["mixtral", "bert"])
def test_a_model_on_the_meta_device_gives_the_same_graph(architecture: str) -> None:
    inputs = make_inputs(architecture)
    with torch.device("meta"):
        on_meta = make_model(architecture)
    assert all(parameter.is_meta for parameter in on_meta.parameters())

    graph = trace_with(on_meta, inputs).graph
    expected = trace_with(make_model(architecture), inputs).graph

    assert _text(graph) == _text(expected)


def _text(graph: fx.Graph) -> list[str]:
    return [f"{node.op} {node.name} {node.args} {node.kwargs}" for node in graph.nodes]


def test_a_graph_serves_any_batch_size_and_length() -> None:
    model = make_model("llama")
    traced = trace_with(model, make_inputs("llama"))

    for batch, length in ((1, 3), (5, 17)):
        tokens = torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(batch))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        assert torch.equal(run_graph(model, traced, inputs).loss, model(**inputs).loss)


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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a_layers_own_checkpointing_is_no_part_of_the_graph() -> None:
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    model.train()
    inputs = make_inputs("llama")

    with _unchanged(model):
        traced = trace_with(model, inputs)

    assert traced.layers == tuple(f"model.layers.{index}" for index in range(4))
    assert torch.equal(run_graph(model, traced, inputs).loss, model(**inputs, use_cache=False).loss)


def test_a_cache_is_refused_as_an_input() -> None:
    with pytest.raises(ValueError, match=r"use_cache=True.*Leave use_cache out"):
        trace_with(make_model("mixtral", layers=2), {**make_inputs("mixtral"), "use_cache": True})


def test_nothing_of_a_model_inside_a_module_is_changed_by_a_trace() -> None:
    inner = make_model("mixtral", layers=2)
    inner.config.use_cache = True
    model = PassesOn(PassesOn(inner))
    inputs = make_inputs("mixtral")

    with _unchanged(inner):
        traced = trace_with(model, inputs)

    assert traced.layers == ("module.module.model.layers.0", "module.module.model.layers.1")
    assert torch.equal(run_graph(model, traced, inputs).logits, inner(**inputs).logits)


class _Scaled(nn.Module):
    """A model with a method that keeps its results, as the anchors of detectors are kept."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @pytorch_utils.compile_compatible_method_lru_cache(maxsize=4)  # type: ignore[untyped-decorator]
    def scale(self, length: int) -> Any:
        return torch.full((length, 1), 0.5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.module(input_ids=input_ids).logits * self.scale(input_ids.size(1))
        return product


def test_a_method_that_keeps_its_results_keeps_none_of_a_trace() -> None:
    model = _Scaled(make_model("llama"))
    inputs = {"input_ids": make_inputs("llama")["input_ids"]}

    values = run_graph(model, trace_with(model, inputs), inputs)

    assert torch.equal(values, model(**inputs))


def test_layers_dropped_at_random_are_refused() -> None:
    model = make_model("llama", layers=2)
    for rate in ("layerdrop", "encoder_layerdrop"):
        setattr(model.config, rate, 0.1)
        with pytest.raises(ValueError, match=rf"config\.{rate}=0\.1.*Set {rate}=0\.0"):
            trace_with(model, make_inputs("llama"))
        setattr(model.config, rate, 0.0)


PACKED = torch.tensor([[0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    ("architecture", "inputs", "refused"),
    [
        ("llama", {"position_ids": PACKED}, True),
        ("llama", {"position_ids": PACKED, "attention_mask": torch.ones(1, 5)}, False),
        ("llama", {"position_ids": torch.arange(3, 8).unsqueeze(0)}, False),
        ("bert", {"position_ids": PACKED}, False),  # an encoder makes no cache
    ],
)
def test_packed_positions_need_a_model_without_a_cache(
    architecture: str, inputs: dict[str, Any], refused: bool
) -> None:
    model = make_model(architecture)
    model.config.use_cache = True
    with pytest.raises(ValueError, match=r"config.use_cache is on.*use_cache=False") if refused else nullcontext():
        refuse_packed_positions(model, inputs)
    model.config.use_cache = False
    refuse_packed_positions(model, inputs)


class _Recurrent(LlamaModel):
    """A model that needs a mask for its padding, as GLM-5 does, and makes one where none is given."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        embeds = self.embed_tokens(input_ids)
        mask = create_recurrent_attention_mask(self.config, embeds, attention_mask)
        if mask is None:
            mask = torch.ones(*input_ids.shape, dtype=torch.bool)
        return super().forward(inputs_embeds=embeds * mask.bool().unsqueeze(-1))


def test_a_recurrent_mask_that_is_not_given_is_none() -> None:
    model: Any = make_model("llama")
    model.model.__class__ = _Recurrent
    ids = make_inputs("llama")["input_ids"]
    assert_exact(model, {"input_ids": ids, "labels": ids})
