"""Devices of parameters that code of the spine asks for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


class ByProperty(PlainModel):
    """Makes a tensor on the device of its first parameter, in its dtype."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def prepare(self, hidden: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        return hidden + torch.arange(hidden.shape[1], device=self.device, dtype=dtype)


class OfOthers(PlainModel):
    """Makes tensors on the devices of a layer and of the head, found in several ways."""

    def prepare(self, hidden: Tensor) -> Tensor:
        layer: Any = self.layers[3]
        first = {name: parameter.device for name, parameter in layer.named_parameters()}["linear.weight"]
        second = self.head.weight.device
        scale = torch.ones(4, device=first) + torch.ones(4, device=second)
        if next(self.head.parameters()).device.type == "cpu":
            scale = scale * sum(parameter.numel() for parameter in self.head.parameters())
        weight = self.head.weight
        zeros = weight.new_zeros(4) + torch.zeros_like(weight).sum() + torch.zeros(()).to(weight)
        return hidden.to(second) * scale + zeros


def train(rank: int, model: Any) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    module = model()
    whole, x = copy.deepcopy(module), torch.ones(4, 4)
    wrapped = NxDPPModel(module, transformer_layer_cls=PlainLayer, broadcast_and_average_loss=True)
    loss = wrapped.run_train(x=x)
    expected = whole(x)
    expected.backward()
    assert isinstance(loss, Tensor)
    assert torch.equal(loss, expected)
    for name, parameter in wrapped.local_named_parameters():
        assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [ByProperty, OfOthers])
def test_a_rank_without_the_parameter(model: Any) -> None:
    run_ranks(2, train, model)


@pytest.mark.parametrize("model", [ByProperty, OfOthers])
def test_the_device_is_that_of_the_first_input(model: Any) -> None:
    module = model()
    graph = trace_with(module, {"x": torch.ones(2, 4)}, options_for(module, PlainLayer)).graph

    made = [node for node in graph.nodes if node.target in (torch.arange, torch.ones)]
    assert made
    for node in made:
        device = node.kwargs["device"]
        assert device.target is getattr
        assert [argument.op for argument in device.all_input_nodes] == ["placeholder"]
    assert type(next(module.parameters())) is nn.Parameter


class OwnWeights(PlainModel):
    """Runs its head with its own parameters, by name."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = functional_call(self.head, dict(self.head.named_parameters()), (hidden,)).mean()
        return result


def test_a_parameter_is_its_own() -> None:
    assert_exact(OwnWeights(), {"x": torch.randn(4, 4)}, PlainLayer)


class Averaged(PlainModel):
    """Averages its head into another one, in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.head).requires_grad_(False)

    def prepare(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.head.parameters(), self.average.parameters(), strict=True):
                self.change(old, new)
        changed: Tensor = hidden + self.average(hidden)
        return changed

    def change(self, old: nn.Parameter, new: nn.Parameter) -> None:
        old.mul_(0.9).add_(new, alpha=0.1)


class AveragedData(Averaged):
    """Gives the averages new memory."""

    def change(self, old: nn.Parameter, new: nn.Parameter) -> None:
        old.data = 0.9 * old.data + 0.1 * new.data


class AveragedInData(Averaged):
    """Changes the memory of the averages by ``data``."""

    def change(self, old: nn.Parameter, new: nn.Parameter) -> None:
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


class AveragedByCopy(Averaged):
    """Copies into the averages."""

    def change(self, old: nn.Parameter, new: nn.Parameter) -> None:
        old.copy_(0.9 * old + 0.1 * new)


@pytest.mark.parametrize("model", [Averaged, AveragedData, AveragedInData, AveragedByCopy])
def test_a_change_of_a_parameter_is_refused_and_changes_nothing(model: Any) -> None:
    module = model()
    before = copy.deepcopy(module.state_dict())

    with pytest.raises(TracingError, match="changes a parameter outside the transformer layers"):
        trace_with(module, {"x": torch.ones(2, 4)}, options_for(module, PlainLayer))

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
