"""Devices of parameters that code of the spine asks for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.graph.errors import TracingError
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


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for module in (ByProperty(), OfOthers()):
        whole, x = copy.deepcopy(module), torch.ones(4, 4)
        wrapped = NxDPPModel(module, transformer_layer_cls=PlainLayer, broadcast_and_average_loss=True)
        loss = wrapped.run_train(x=x)
        expected = whole(x)
        expected.backward()
        assert isinstance(loss, Tensor)
        assert torch.equal(loss, expected)
        for name, parameter in wrapped.local_named_parameters():
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name  # type: ignore[arg-type]


def test_a_rank_without_the_parameter() -> None:
    run_ranks(2, train)


class Averaged(PlainModel):
    """Averages its head into another one, in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.head).requires_grad_(False)

    def prepare(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.head.parameters(), self.average.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        changed: Tensor = hidden + self.average(hidden)
        return changed


def test_a_change_of_a_parameter_is_refused_and_changes_nothing() -> None:
    module = Averaged()
    before = copy.deepcopy(module.state_dict())

    with pytest.raises(TracingError, match="changes a parameter outside the transformer layers"):
        trace_with(module, {"x": torch.ones(2, 4)}, options_for(module, PlainLayer))

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
