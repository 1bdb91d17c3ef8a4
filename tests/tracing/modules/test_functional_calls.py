"""Calls of modules with other parameters than their own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import stateless

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


class Scaled(PlainModel):
    """Runs its layers with smaller weights."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            weights = {name: 0.9 * parameter for name, parameter in layer.named_parameters()}
            hidden = functional_call(layer, weights, (hidden,))
        result: Tensor = self.head(hidden).mean()
        return result


class OfInputs(PlainModel):
    """Runs its head with weights that follow from the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        weights = {"weight": hidden.mean(0, keepdim=True)}
        result: Tensor = stateless.functional_call(self.head, weights, (hidden,)).mean()
        return result


class ScaledLayer(PlainLayer):
    """Runs a part of it with a smaller weight: the remedy of the message."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.9 * parameter for name, parameter in self.linear.named_parameters()}
        return torch.tanh(functional_call(self.linear, weights, (x,)))


class Remedied(PlainModel):
    """Layers that call themselves with smaller weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(ScaledLayer() for _ in range(4))


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.stateless.*")
@pytest.mark.parametrize(("model", "tracer"), [(Scaled, "torch"), (OfInputs, None)])
def test_calls_with_given_parameters_are_refused(model: Any, tracer: str | None) -> None:
    module = model()

    with pytest.raises(TracingError, match=r"functional_call runs (PlainLayer|Linear) outside .*Move the call"):
        trace_with(module, {"x": torch.ones(2, 4)}, options_for(module, PlainLayer, tracer_cls=tracer))


def test_a_call_inside_of_a_layer_is_exact() -> None:
    assert_exact(Remedied(), {"x": torch.randn(4, 4)}, ScaledLayer)
