"""A module's output that is compared with ``None`` between layers: answered, checked, and never taken for granted."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.none_tests import compared_with_none
from nxdpp.tracing.sizes import shapes_of
from nxdpp.tracing.trace import TracedGraph, trace
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


class Embedding(nn.Module):
    """Gives a mask for long inputs only, as HieraEmbeddings does for pretraining only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.linear(x), (x > 0 if len(x) > 3 else None)


class EmbeddingByData(Embedding):
    """Gives a mask where the data say so."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.linear(x), (x > 0 if bool(x.sum() > 0) else None)


class ComparesWithNone(PlainModel):
    """Masks its hidden states where there is a mask."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.first = embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.first(x)
        if mask is not None:
            hidden = hidden * mask
        for layer in self.layers:
            hidden = layer(hidden)
        gate = None if mask is None else mask.sum()
        result: torch.Tensor = self.head(hidden).mean() * (1 if gate is None else gate)
        return result


def _trace(model: nn.Module, x: torch.Tensor) -> TracedGraph:
    specs = {"x": InputSpec(x.ndim, x.dtype)}
    return trace(model, specs, {}, options_for(model, PlainLayer), shapes_of({"x": x}))


def _run(model: nn.Module, traced: TracedGraph, x: torch.Tensor) -> torch.Tensor:
    (result,) = torch.fx.GraphModule(model, traced.graph)(x)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("rows", [3, 5])
def test_the_branch_is_that_of_the_inputs(rows: int) -> None:
    model, x = ComparesWithNone(Embedding()), torch.randn(rows, 4)

    traced = _trace(model, x)

    assert torch.equal(_run(model, traced, x), model(x))
    assert {(fact.read.__name__, fact.answer) for fact in traced.facts} == {("is_none", rows == 3)}


def test_what_only_the_data_tells_is_checked_when_the_graph_runs() -> None:
    model, x = ComparesWithNone(EmbeddingByData()), torch.ones(3, 4)

    traced = _trace(model, x)

    assert traced.facts == ()
    assert torch.equal(_run(model, traced, x), model(x))
    place = r"\n  at .*test_none_tests\.py:\d+, in forward: if mask is not None:\n"
    with pytest.raises(RuntimeError, match=rf"compared with None is None.*{place}.*leaf_module_cls"):
        _run(model, traced, -x)


def test_nothing_is_asked_of_what_is_a_tensor() -> None:
    class Model(PlainModel):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x = x if y is None else x + y
            return super().forward(x + 1 if x is not None else x)

    model = Model()
    traced = trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert traced.facts == ()
    assert torch.equal(_run(model, traced, torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_a_debugger_sees_what_comes_afterwards() -> None:
    def watch(frame: Any, event: str, argument: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        _trace(ComparesWithNone(Embedding()), torch.ones(3, 4))
        after = sys.gettrace()
    finally:
        sys.settrace(before)

    assert after is watch


def test_the_variables_that_are_compared() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        x = a is None
        if b is not None:
            return x
        return [c is None for _ in range(3)], c == 3, None is a

    assert sorted(compared_with_none(function.__code__).values()) == ["a", "b"]
