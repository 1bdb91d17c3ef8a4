"""A Function of the user's own has its own backward, also in the spine."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.tracing.errors import TracingError
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with


class _TripledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 3 * gradients[0], None


_tripled: Any = _TripledGradient


class _Runs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@pytest.mark.parametrize("tracer", ["hf", "torch"])
def test_its_backward_is_the_one_that_runs(tracer: str) -> None:
    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return _tripled.apply(hidden, 1.5)  # type: ignore[no-any-return]

    model = Model()
    inputs = {"x": torch.ones(2, 4)}
    traced = trace_with(model, inputs, options_for(model, PlainLayer, tracer_cls=tracer))
    model(**inputs).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    run_graph(model, traced, inputs).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert _tripled.apply(torch.ones(2), 2.0).tolist() == [2, 2]


def test_one_that_runs_layers_in_its_backward_is_refused() -> None:
    class Reversible(PlainModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            function: Any = _Runs
            result: torch.Tensor = self.head(function.apply(self.embedding(x), self.layers)).mean()
            return result

    model = Reversible()
    with pytest.raises(TracingError, match=r"_Runs is an autograd Function .*\n  at .*test_autograd_.*py:\d"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
