"""Plain modules: traced with functions and modules of the user as single nodes."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracingOptions
from tests.support import plain_functions
from tests.support.traced_models import (
    PlainLayer,
    PlainModel,
    options_for,
    run_graph,
    trace_with,
)


def sign_of_the_sum(hidden: torch.Tensor) -> torch.Tensor:
    """A decision that depends on the data."""
    if hidden.sum() > 0:
        return hidden
    return -hidden


class Branch(nn.Module):
    """The same decision in a module."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sign_of_the_sum(hidden)


class BranchesInForward(PlainModel):
    """Branch in ``forward``, in whose globals fx looks for wrapped functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(sign_of_the_sum(x))


class BranchesInAModule(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.branch(hidden)
        return result


class BranchingTracer(fx.Tracer):
    """A tracer of a user with its own leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Branch) or super().is_leaf_module(m, module_qualified_name)


def _options(model: nn.Module, **options: Any) -> TracingOptions:
    return options_for(model, PlainLayer, **options)


def _check(model: nn.Module, options: TracingOptions) -> None:
    """Fail unless graph and model agree for inputs of both decisions."""
    batches = [torch.full((3, 4), 0.5), torch.full((3, 4), -0.5), torch.full((3, 4), 5.0)]
    traced = trace_with(model, {"x": batches[0]}, options)
    assert traced.layers == tuple(f"layers.{index}" for index in range(4))
    for batch in batches:
        assert torch.equal(run_graph(model, traced, {"x": batch}), model(batch))


@pytest.mark.parametrize("tracer", ["hf", "torch", BranchingTracer])
def test_every_tracer_wraps_functions(tracer: Any) -> None:
    model = BranchesInForward()
    with pytest.raises(TracingError, match="in sign_of_the_sum"):
        _check(model, _options(model, tracer_cls=tracer))

    _check(model, _options(model, autowrap_functions=(sign_of_the_sum,), tracer_cls=tracer))


class CallsAModule(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return plain_functions.sign_of(hidden)


def test_the_functions_of_a_python_module_are_wrapped() -> None:
    model = CallsAModule()
    name = "tests.support.plain_functions"
    with pytest.raises(TracingError, match=rf"single nodes: import {name}; autowrap_modules=\[{name}\]"):
        _check(model, _options(model))

    _check(model, _options(model, autowrap_modules=(plain_functions,)))


def test_a_tracer_of_the_users_own() -> None:
    model = BranchesInAModule()

    _check(model, _options(model, tracer_cls=BranchingTracer))
