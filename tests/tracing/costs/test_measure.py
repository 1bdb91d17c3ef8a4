"""Measured seconds of nodes. The model, its gradients and the random state do not change."""

import time
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.partition.assignment import assign_layers
from nxdpp.tracing.costs.measure import Seconds, measure_nodes
from tests.support.models import make, padded_batch
from tests.support.traced_models import options_for, trace_with


def _measure(model: nn.Module, inputs: dict[str, torch.Tensor], classes: Any = None) -> dict[str, Seconds]:
    traced = trace_with(model, inputs, options_for(model, classes))
    assigned = assign_layers(traced, model, traced.layers)
    seconds = measure_nodes(traced, model, inputs, assigned, torch.device("cpu"))
    assert seconds.keys() == assigned.keys()
    return {node.name: taken for node, taken in seconds.items()}


class Timed(torch.autograd.Function):
    """Function that takes 10 ms forward and 20 ms backward."""

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


def test_forward_and_backward_are_measured_once_for_equal_layers() -> None:
    Layer.calls = 0
    # The first layer needs no gradient of its input. The others do.
    seconds = _measure(Model(), {"x": torch.rand(3, 4)}, Layer)

    first = seconds["model_layers_0"]
    assert 0.01 <= first.forward < first.backward
    assert first.backward >= 0.02
    assert Layer.calls == 2 * 9
    alike = {seconds[f"model_layers_{index}"] for index in range(1, 10)}
    assert len(alike) == 1
    assert 0 < sum(alike.pop()) < sum(first)
    assert all(taken.forward > 0 for taken in seconds.values())


def test_model_is_not_changed() -> None:
    model, batch = make("mixtral"), padded_batch(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()

    _measure(model, batch)

    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
