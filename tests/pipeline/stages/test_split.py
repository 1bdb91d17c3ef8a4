"""Split of a graph into stages: boundary tensors, recomputed values, and equality with the model."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.pipeline.stages.split import plan_stages
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import ARCHITECTURES, PlainLayer, PlainModel, make_inputs, make_model, options_for


def _chain(model: nn.Module, stages: int, x: torch.Tensor) -> InProcessPipeline:
    return InProcessPipeline(model, stages, {"x": x}, options_for(model, PlainLayer))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_tensor_crosses_each_boundary_and_the_stages_together_equal_the_model(architecture: str) -> None:
    model = make_model(architecture).train()
    inputs = make_inputs(architecture)

    chain = InProcessPipeline(model, 3, inputs)

    assert [(source, destination) for _, source, destination in chain.boundary_tensors] == [(0, 1), (1, 2)]
    ends = {stage: layer for layer, stage in chain.partition.layer_stages.items()}
    by_name = {node.name: node for node in chain.cut.traced.graph.nodes}
    assert [by_name[value].target for value, _, _ in chain.boundary_tensors] == [ends[0], ends[1]]
    torch.manual_seed(5)
    output = chain.forward(inputs)
    torch.manual_seed(5)
    expected = model(**inputs)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_other_inputs_have_the_same_boundaries(architecture: str) -> None:
    model = make_model(architecture)
    embeds = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(2))
    inputs = {"inputs_embeds": embeds, "attention_mask": make_inputs(architecture)["attention_mask"]}

    chain = InProcessPipeline(model, 3, inputs)

    assert [(source, destination) for _, source, destination in chain.boundary_tensors] == [(0, 1), (1, 2)]
    assert torch.equal(chain.forward(inputs).logits, model(**inputs).logits)


class SkipConnection(PlainModel):
    """A model that uses the embedding after the last layer, and the first layer's output in the third."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(x)
        first = self.layers[0](embedded)
        hidden = self.layers[1](first)
        hidden = self.layers[2](hidden + first)
        result: torch.Tensor = self.head(self.layers[3](hidden) + embedded).mean()
        return result


def test_a_skip_connection_is_sent_from_its_source_to_its_destination() -> None:
    model = SkipConnection()
    x = torch.randn(3, 4)

    chain = _chain(model, 4, x)

    assert sorted(chain.boundary_tensors) == sorted(
        [
            ("model_embedding", 0, 3),
            ("model_layers_0", 0, 1),
            ("model_layers_0", 0, 2),
            ("model_layers_1", 1, 2),
            ("model_layers_2", 2, 3),
        ]
    )
    assert [plan.destination_stages for plan in chain.plans] == [[1, 2, 3], [2], [3], []]
    assert torch.equal(chain.forward({"x": x}), model(x))


class InputsAndBuffers(PlainModel):
    """A model whose layers all take a value computed from the input and a buffer."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        bias = (x * self.table).cumsum(0) + torch.arange(hidden.shape[0]).unsqueeze(1).to(hidden)
        for layer in self.layers:
            hidden = layer(hidden + bias + torch.zeros_like(hidden) + hidden.new_ones(hidden.size(0), 4))
        result: torch.Tensor = self.head(hidden).mean()
        return result


def test_values_of_inputs_and_buffers_are_recomputed() -> None:
    model = InputsAndBuffers()
    x = torch.randn(3, 4)

    chain = _chain(model, 4, x)

    assert [(source, destination) for _, source, destination in chain.boundary_tensors] == [(0, 1), (1, 2), (2, 3)]
    assert [plan.inputs for plan in chain.plans] == [["x"]] * 4
    assert torch.equal(chain.forward({"x": x}), model(x))


class DropoutOutside(PlainModel):
    """A model with dropout outside the layers, which one stage draws and sends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = nn.functional.dropout(x, 0.5, training=self.training)
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden + noise)
        result: torch.Tensor = self.head(hidden).mean()
        return result


class MakesNoise(PlainModel):
    """A model whose layers all take noise that depends on no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = x.new_empty(4).uniform_()
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden + noise)
        result: torch.Tensor = self.head(hidden).mean()
        return result


def test_noise_outside_the_layers_is_drawn_once() -> None:
    for model in (DropoutOutside(), MakesNoise()):
        x = torch.randn(3, 4)
        chain = _chain(model, 2, x)
        torch.manual_seed(1)
        output = chain.forward({"x": x})
        torch.manual_seed(1)
        assert torch.equal(output, model(x))


def test_a_value_of_a_later_stage_is_refused() -> None:
    model = PlainModel()
    chain = _chain(model, 2, torch.ones(3, 4))
    backwards: dict[Any, int] = {node: 1 - stage for node, stage in chain.cut.assigned.items()}
    (result,) = (node for node in chain.cut.traced.graph.nodes if node.name == chain.plans[-1].results[0])
    backwards[result] = 0

    with pytest.raises(ValueError, match=r"stage 0 needs the value .* of the later stage 1.*pipeline_cuts"):
        plan_stages(chain.cut.traced, model, backwards, [result], 2)
