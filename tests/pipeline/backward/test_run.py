"""Backwards run outside of the caller's autocast."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from nxdpp.pipeline.backward.graph import BackwardAnalysis
from nxdpp.pipeline.backward.run import run_backward
from nxdpp.pipeline.backward.split import SplitBackward
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


class AsksForAutocast(torch.autograd.Function):
    """Notes whether its backward runs under autocast."""

    states: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        AsksForAutocast.states.append(torch.is_autocast_enabled("cpu"))
        return gradients[0] * 2


class WithIsland(PlainLayer):
    """A layer with a part in float32 inside autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x).float()
        with torch.autocast("cpu", enabled=False):
            asked: torch.Tensor = AsksForAutocast.apply(hidden @ self.linear.weight)  # type: ignore[no-untyped-call]
        return asked


class Islands(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithIsland() for _ in range(4))


@pytest.mark.parametrize("splits", [False, True])
def test_the_backward_runs_outside_the_callers_autocast(splits: bool) -> None:
    model, x = Islands(), torch.randn(4, 4)
    whole = copy.deepcopy(model)
    AsksForAutocast.states.clear()
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(x)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16):
        if splits:
            hidden = model.embedding(x)
            edge = get_gradient_edge(hidden)
            loss = model.head(nn.Sequential(*model.layers)(hidden)).mean()
            split = SplitBackward(BackwardAnalysis(), [edge], [loss])
            (gradient,) = split.input_gradients([torch.ones_like(loss)])
            split.weight_gradients()
            assert gradient is not None
            run_backward([edge], [gradient])
        else:
            pipeline = InProcessPipeline(model, 2, {"x": x}, transformer_layer_cls=WithIsland)
            (loss,) = pipeline.train({"x": x}, 1)
    assert torch.equal(loss, expected)
    assert AsksForAutocast.states
    assert not any(AsksForAutocast.states)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
