"""Calls of modules with other parameters than their own."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

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


@pytest.mark.parametrize("tracer", ["torch", None])
def test_calls_with_given_parameters_are_refused(tracer: str | None) -> None:
    module = Scaled()

    with pytest.raises(TracingError, match=r"functional_call runs PlainLayer outside .*Move the call"):
        trace_with(module, {"x": torch.ones(2, 4)}, options_for(module, PlainLayer, tracer_cls=tracer))


def test_a_call_inside_of_a_layer_is_exact() -> None:
    assert_exact(Remedied(), {"x": torch.randn(4, 4)}, ScaledLayer)
