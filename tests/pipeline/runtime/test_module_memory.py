"""Values in the memory of a module, which changes it for the next microbatch while they are in flight."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


class Counting(PlainLayer):
    """Adds to a buffer and to a plain tensor in each run."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(4))
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.load += y.detach().mean(0)
        return y


class Returning(Counting):
    """Returns both beside its output."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.total.add_(y.detach().mean(0))
        return y, {"load": self.load, "total": self.total.view(2, 2)}


class Read(PlainModel):
    """Reads the buffers of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        layers: Any = self.layers
        loads = sum(layer.load for layer in layers)
        loss: Tensor = (self.head(hidden + loads)).square().mean()
        return loss


class Returned(PlainModel):
    """Uses what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        loads = []
        for layer in self.layers:
            hidden, counts = layer(hidden)
            loads.append(counts["load"] + counts["total"].flatten())
        loss: Tensor = self.head(hidden + torch.stack(loads).sum(0)).square().mean()
        return loss


@pytest.mark.parametrize(("model", "layer"), [(Read, Counting), (Returned, Returning)])
def test_each_microbatch_has_its_own_values(model: Any, layer: Any) -> None:
    module, x = model(), torch.randn(8, 4)
    whole = copy.deepcopy(module)
    pipeline = InProcessPipeline(module, 3, transformer_layer_cls=layer)

    losses = pipeline.train({"x": x}, 4, in_flight=True)

    expected = []
    for part in x.chunk(4):
        expected.append(whole(part))
        (expected[-1] / 4).backward()
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for (name, ours), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
