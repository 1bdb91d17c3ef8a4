"""Selections by data are taken to have items, and checked in every step."""

from collections.abc import Callable

import pytest
import torch

from nxdpp.tracing.graph.errors import TracingError
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with

Tensor = torch.Tensor


class Selecting(PlainModel):
    """Multiply the hidden states by a function of the input."""

    def __init__(self, factor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.__dict__["factor"] = factor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(hidden * self.__dict__["factor"](x)).mean()
        return result


def _shape(x: Tensor) -> Tensor:
    rows = (x > 0).nonzero()
    return torch.ones(()) if rows.shape[0] == 0 else x.sum() / 2


def _number(x: Tensor) -> Tensor:
    return x.masked_select(x > 0).sum() if torch.masked_select(x, x > 0).numel() >= 1 else torch.ones(())


@pytest.mark.parametrize("factor", [_shape, _number])
def test_the_way_with_items_is_taken_and_checked(factor: Callable[[Tensor], Tensor]) -> None:
    model = Selecting(factor)
    x = torch.tensor([[1.0, -2.0, 3.0, -4.0], [-1.0, 5.0, -1.0, -1.0]])
    traced = trace_with(model, {"x": x}, options_for(model, PlainLayer))
    for rows in (x, x.flip(0)[:1]):
        assert torch.equal(run_graph(model, traced, {"x": rows}), model(rows))
    with pytest.raises(RuntimeError, match=r"the data select no item[\s\S]*test_selections.py:\d+, in _"):
        run_graph(model, traced, {"x": -x.abs()})


def test_another_number_is_refused() -> None:
    model = Selecting(lambda x: x.sum() if x[x > 0].size(0) > 3 else torch.ones(()))
    with pytest.raises(TracingError, match="only the data tells"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
