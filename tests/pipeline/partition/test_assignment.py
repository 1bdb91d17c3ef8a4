"""Stages of parameters that the first trace does not use."""

import copy

import torch
from torch import nn

from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for

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
