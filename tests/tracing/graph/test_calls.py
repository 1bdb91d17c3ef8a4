"""Calls that are one node of the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.modes import Modes, modes_of
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with


class _TripledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 3 * gradients[0], None


class _NegatedGradient(_TripledGradient):
    """Its forward is the other Function's."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0], None


class _WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 5 * ctx.factor * gradients[0], None


_tripled: Any = _TripledGradient
_negated: Any = _NegatedGradient
_with_setup: Any = _WithSetup
_held = _tripled.apply


def _local(hidden: torch.Tensor) -> Any:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return 7 * gradients[0]

    function: Any = Local
    return function.apply(hidden)


_CALLS: list[Callable[[torch.Tensor], Any]] = [
    lambda hidden: _tripled.apply(hidden, 1.5),
    lambda hidden: _held(hidden, 1.5),
    lambda hidden: _negated.apply(hidden, 1.5),
    lambda hidden: _with_setup.apply(hidden),
    lambda hidden: _with_setup.apply(hidden, 3.0),
    # A forward that code calls by itself has the gradient of its operations.
    lambda hidden: _tripled.forward(None, hidden, 1.5),
    lambda hidden: _with_setup.forward(hidden, 1.5),
]


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
            for call in _CALLS:
                hidden = call(hidden)
            return hidden

    before = [dict(vars(each)) for each in (torch.autograd.Function, _tripled, _negated, _with_setup)]
    model = Model()
    inputs = {"x": torch.ones(2, 4)}
    traced = trace_with(model, inputs, options_for(model, PlainLayer, tracer_cls=tracer))
    model(**inputs).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    run_graph(model, traced, inputs).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert before == [dict(vars(each)) for each in (torch.autograd.Function, _tripled, _negated, _with_setup)]


def test_a_function_runs_with_the_gradients_of_its_call() -> None:
    """torch turns gradients off before it calls a forward."""

    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                mask = _held(hidden, 1.5)
            return hidden * mask + _held(hidden, 1.5)  # type: ignore[no-any-return]

    model = Model()
    traced = trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
    nodes = [modes_of(node) for node in traced.graph.nodes if isinstance(node.target, OpaqueCall)]
    assert nodes == [Modes((("gradients", False),)), Modes()]


def test_a_function_that_the_forward_defines_is_not_traced_through() -> None:
    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return _local(hidden)  # type: ignore[no-any-return]

    model = Model()
    with pytest.raises(TracingError, match=r"differs in two runs: Local\(model_embedding\)"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))


def test_a_function_that_runs_layers_in_its_backward_is_refused() -> None:
    class Reversible(PlainModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            function: Any = _Runs
            result: torch.Tensor = self.head(function.apply(self.embedding(x), self.layers)).mean()
            return result

    model = Reversible()
    with pytest.raises(TracingError, match=r"_Runs is an autograd Function .*\n  at .*test_calls.py:\d"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))


class CallsForward(PlainModel):
    """Calls its layers without their hooks, as SqueezeBERT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


def test_layers_whose_forward_is_called_are_nodes() -> None:
    model = CallsForward()

    traced = trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert traced.layers == tuple(f"layers.{index}" for index in range(len(model.layers)))
    assert all("forward" not in vars(module) for module in model.modules())
