"""Split of a graph into stages: boundary tensors, recomputed values, and equality with the model."""

import pytest
import torch
from torch import nn

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
