"""Assignment of nodes and parameters to stages."""

import copy

import pytest
import torch
from torch import nn

from nxdpp.pipeline.partition.assignment import check_layers_ran
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

X = {"x": torch.ones(3, 4)}


class LateTower(PlainModel):
    """A model that uses ``tower`` and ``shift`` before its layers, for some inputs, and registers them after these."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4))
        self.pooler = nn.Linear(4, 4)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.tower(image) + self.shift
        return encoded

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(x)
        if image is not None:
            hidden = hidden + self.encode(image)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(hidden if image is None else self.pooler(hidden)).mean()
        return result


def test_an_unused_part_before_the_layers_is_on_their_stage() -> None:
    model = LateTower()
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, 2, X, options_for(model, PlainLayer))
    owners = pipeline.partition.owners

    assert owners["tower.weight"] == owners["shift"] == {0}
    assert owners["pooler.weight"] == {1}
    batch = {**X, "image": torch.randn(3, 4)}
    loss = whole(**batch)
    loss.backward()
    assert torch.equal(pipeline.train(batch, 1)[0], loss)
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]


def test_layers_must_run_once_and_in_order() -> None:
    class Reversed(PlainModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(x)
            for layer in [*self.layers][:0:-1]:
                hidden = layer(hidden)
            result: torch.Tensor = self.head(self.layers[3](hidden)).mean()
            return result

    model = Reversed()
    traced = trace_with(model, X, options_for(model, PlainLayer))

    with pytest.raises(ValueError, match="every transformer layer to run once") as caught:
        check_layers_ran(traced, [f"layers.{index}" for index in range(4)])

    message = str(caught.value)
    assert "Not run with the inputs ['x']: ['layers.0']" in message
    assert "Run several times: ['layers.3']" in message
    assert "['layers.3', 'layers.2', 'layers.1', 'layers.3']" in message
    assert "transformer_layer_cls" in message
