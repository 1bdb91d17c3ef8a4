"""Changes through ``.data`` of a tensor that the backward needs are refused in the first run."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline


class Layer(nn.Module):
    """Divides by a running deviation."""

    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("std", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) / self.updated(x.detach().std(0))

    def updated(self, std: Tensor) -> Tensor:
        self.std.data.mul_(0.9).add_(0.1 * std)
        return self.std


class Assigns(Layer):
    def updated(self, std: Tensor) -> Tensor:
        self.std = 0.9 * self.std + 0.1 * std
        return self.std


class Copies(Layer):
    def updated(self, std: Tensor) -> Tensor:
        return super().updated(std).clone()


class Stores(Layer):
    """Keeps a value that the backward does not need."""

    def updated(self, std: Tensor) -> Tensor:
        super().updated(std)
        return torch.ones(4)


class UsesBatchNorm(Layer):
    """Has running statistics of its own, which torch's function changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(torch.tanh(self.linear(x)), self.mean, self.std, training=True)


class Model(nn.Module):
    def __init__(self, *layers: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_change_of_a_tensor_that_the_backward_needs_is_refused() -> None:
    pipeline = InProcessPipeline(Model(Layer, Layer), 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=Layer)
    with pytest.raises(RuntimeError, match=r"layers\.0 \(\w+\) changes std .*\.data.*self\.std = .*\.clone\(\)"):
        pipeline.train({"x": torch.randn(4, 4)}, 2, in_flight=True)


def test_other_changes_are_exact() -> None:
    layers = (Assigns, Copies, Stores, UsesBatchNorm)
    assert_exact(Model(*layers), {"x": torch.randn(4, 4)}, list(layers))
