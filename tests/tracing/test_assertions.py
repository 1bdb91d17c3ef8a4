"""An assertion about data between layers: part of the graph, and checked with each batch."""

import pytest
import torch

from nxdpp.tracing.assertions import is_assertion
from nxdpp.tracing.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import Asserts, PlainLayer, PlainModel, options_for, trace_with

X = torch.ones(3, 4)


class Decides(PlainModel):
    """Raises an error of its own, which is a decision like any other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.all(x > 0):
            raise ValueError("x must be positive")
        return super().forward(x)


def _chain(stages: int) -> tuple[Asserts, InProcessPipeline]:
    model = Asserts()
    return model, InProcessPipeline(model, stages, {"x": X}, options_for(model, PlainLayer))


def test_an_assertion_is_a_node() -> None:
    model = Asserts()

    traced = trace_with(model, {"x": X}, options_for(model, PlainLayer))

    assert sum(is_assertion(node) for node in traced.graph.nodes) == 2


def test_anything_else_that_only_the_data_tells_is_refused() -> None:
    model = Decides()

    with pytest.raises(
        TracingError, match=r"only the data tells.*\n  at .*test_assertions\.py:\d+, in forward: if not"
    ):
        trace_with(model, {"x": X}, options_for(model, PlainLayer))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_an_assertion_that_holds_changes_nothing(stages: int) -> None:
    model, chain = _chain(stages)

    assert torch.equal(chain.forward({"x": X}), model(X))
    assert len(chain.boundary_tensors) == stages - 1


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("x", "line"),
    [(-X, r"assert torch\.all\(x > 0\)"), (X / 0, r"assert hidden\.isfinite\(\)")],
    ids=["of the inputs", "of a later stage"],
)
def test_an_assertion_that_does_not_hold_is_raised(stages: int, x: torch.Tensor, line: str) -> None:
    _, chain = _chain(stages)

    with pytest.raises(AssertionError, match=rf"does not hold\n  at .*traced_models\.py:\d+, in forward: {line}"):
        chain.forward({"x": x})
