"""Nodes are timed on the device one by one; the model, its gradients and chance stay as they were."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.pipeline.cost.measure import profile_nodes
from nxdpp.pipeline.partition.assignment import assign_layers
from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.trace import TracingOptions, trace
from tests.support.models import MODELS, make, padded_batch


def _profile(model: nn.Module, inputs: dict[str, torch.Tensor], classes: Any = None) -> dict[str, float]:
    options = TracingOptions(find_layer_classes(model, classes))
    specs = {name: InputSpec(value.ndim, value.dtype) for name, value in inputs.items()}
    traced = trace(model, specs, {}, options)
    layers = layer_names(model, options.layer_classes)
    placed = assign_layers(traced, model, layers)
    seconds = profile_nodes(traced, model, inputs, placed, torch.device("cpu"))
    assert seconds.keys() == placed.keys()
    return {node.name: taken for node, taken in seconds.items()}


class Timed(torch.autograd.Function):
    """Ten milliseconds forward and twenty backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return gradient


class Layer(nn.Module):
    calls = 0

    def __init__(self, timed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=timed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.calls += 1
        result: torch.Tensor = self.linear(x)
        return result if self.linear.bias is None else Timed.apply(result)  # type: ignore[no-untyped-call,no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(timed=True), *(Layer(timed=False) for _ in range(9))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.relu_().square().mean()


def test_forward_and_backward_are_timed_and_layers_that_are_alike_once() -> None:
    Layer.calls = 0
    # The first needs no gradient for its input, the others do.
    seconds = _profile(Model(), {"x": torch.rand(3, 4)}, Layer)

    assert seconds["model_layers_0"] >= 0.03
    assert Layer.calls == 2 * 9
    alike = {seconds[f"model_layers_{index}"] for index in range(1, 10)}
    assert len(alike) == 1
    assert 0 < alike.pop() < seconds["model_layers_0"]
    assert all(taken > 0 for taken in seconds.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_stays_as_it_is(name: str) -> None:
    model, batch = make(name), padded_batch(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()

    _profile(model, batch)

    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_the_meta_device_is_stood_in_for_a_module_at_a_time(name: str) -> None:
    with torch.device("meta"):
        model, batch = make(name), {key: value.to("meta") for key, value in padded_batch(2).items()}

    seconds = _profile(model, batch)

    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(taken > 0 for taken in seconds.values())


class Broken(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch.fx.Proxy):
            return super().forward(x)
        raise RuntimeError("out of memory")


def test_what_a_layer_raises_is_raised() -> None:
    model = Model()
    model.layers[3] = Broken(timed=False)

    with pytest.raises(RuntimeError, match="out of memory"):
        _profile(model, {"x": torch.rand(3, 4)}, Layer)
