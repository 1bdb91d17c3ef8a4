"""Plain modules: traced as they are, traced with options, or refused with a message."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracingOptions
from tests.support.traced_models import (
    PlainLayer,
    PlainModel,
    make_inputs,
    make_model,
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


def test_a_tracer_of_the_users_own() -> None:
    model = BranchesInAModule()

    _check(model, _options(model, tracer_cls=BranchingTracer))


@pytest.mark.parametrize(("leaf", "where"), [("LlamaModel", "model"), ("LlamaForCausalLM", "the model")])
def test_a_leaf_that_holds_layers_is_refused(leaf: str, where: str) -> None:
    model = make_model("llama", layers=2)
    options = options_for(model, leaves=(leaf,))
    with pytest.raises(ValueError, match=rf"leaf_module_cls names {leaf}, but {where} of that class holds"):
        trace_with(model, make_inputs("llama"), options)


def test_targets_are_the_names_of_the_module() -> None:
    class WithParameter(PlainModel):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((4,), 2.0))
            self.register_buffer("shift", torch.arange(4.0))

        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * self.scale + self.shift

    model = WithParameter()
    traced = trace_with(model, {"x": torch.ones(3, 4)}, _options(model))

    assert {node.target for node in traced.graph.nodes if node.op == "get_attr"} == {"scale", "shift"}
    layers = [f"layers.{index}" for index in range(4)]
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["embedding", *layers, "head"]
    _check(model, _options(model))


def test_a_layer_run_twice_is_listed_twice() -> None:
    class Repeats(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers[0](hidden)
            return result

    model = Repeats()

    assert trace_with(model, {"x": torch.ones(3, 4)}, _options(model)).layers[:3] == (
        "layers.0",
        "layers.0",
        "layers.1",
    )
