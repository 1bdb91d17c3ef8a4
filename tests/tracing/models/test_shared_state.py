"""The content of a mapping that layers fill for later layers is a value of the graph."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace
from nxdpp.tracing.sizes.input_specs import InputSpec
from tests.support.traced_models import run_graph

INPUTS = {"x": InputSpec(2, torch.float32)}


class Sharing(nn.Module):
    """Store its product under ``key``, or take the stored product."""

    def __init__(self, stores: bool, key: str = "a") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stores = stores
        self.key = key

    def forward(self, x: Tensor, shared: UserDict[str, Tensor]) -> Tensor:
        if self.stores:
            shared[self.key] = self.linear(x)
        return x + shared[self.key]


class SharingModel(nn.Module):
    """Layers that share through a mapping; the first product reaches the third layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        shared: UserDict[str, Tensor] = UserDict()
        for layer in self.layers:
            x = layer(x, shared=shared)
        return self.result(x, shared)

    def result(self, x: Tensor, shared: UserDict[str, Tensor]) -> Any:
        return x.sum()


def traced(model: nn.Module) -> TracedGraph:
    return trace(model, INPUTS, {}, TracingOptions((Sharing,)))


def test_a_layer_gets_the_tensors_of_an_earlier_layer_and_gradients_flow_back() -> None:
    model = SharingModel(Sharing(True), Sharing(True, "b"), Sharing(False), Sharing(True))
    x = torch.randn(3, 4)
    graph = traced(model)
    assert graph.layers == ("layers.0", "layers.1", "layers.2", "layers.3")

    expected = model(x)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for _ in range(2):  # the first run leaves nothing
        loss = run_graph(model, graph, {"x": x})
        assert torch.equal(loss, expected)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert parameter.grad is None or gradient is None or torch.equal(parameter.grad, gradient)


def test_a_forward_that_reads_the_mapping_is_refused_by_name_and_line() -> None:
    class Reading(SharingModel):
        def result(self, x: Tensor, shared: UserDict[str, Tensor]) -> Any:
            return x, "a" in shared

    with pytest.raises(TracingError, match=r"UserDict(.|\n)*at .*\.py:\d+, in"):
        traced(Reading(Sharing(True)))


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        losses.append(x.square().mean())
        return self.linear(x)  # type: ignore[no-any-return]


class AppendingModel(SharingModel):
    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, losses)
        return x.mean() + sum(losses)


def test_a_list_that_layers_would_fill_is_refused() -> None:
    model = AppendingModel(Appending(), Appending())
    with pytest.raises(TracingError, match=r"Appending is given an empty list .*\n  at .*test_shared_st.*.py:\d+"):
        trace(model, INPUTS, {}, TracingOptions((Appending,)))
