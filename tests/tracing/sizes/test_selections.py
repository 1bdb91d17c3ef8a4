"""Questions for the number of items that data select are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxdpp.tracing.graph.errors import TracingError
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with
from tools.zoo import build, inputs
from tools.zoo.comparison import without_randomness

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


def _another_number(x: Tensor) -> Tensor:
    return x.sum() if x[x > 0].size(0) > 3 else torch.ones(())


@pytest.mark.parametrize("factor", [_shape, _number, _another_number])
def test_a_question_for_the_number_of_items_is_refused(factor: Callable[[Tensor], Tensor]) -> None:
    model = Selecting(factor)
    with pytest.raises(TracingError, match=r"only the data tells[\s\S]*test_selections.py:\d+, in _"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))


def test_a_classifier_that_asks_for_labels_is_refused_with_its_remedy() -> None:
    model: Any = build("sequence-classification", "deberta")
    batch = inputs("sequence-classification", model, 0)
    with pytest.raises(TracingError, match=r"only the data tells[\s\S]*modeling_deberta.py:\d+[\s\S]*problem_type="):
        trace_with(model, batch)

    model.config.problem_type = "single_label_classification"
    without_randomness(model)
    traced = trace_with(model, batch)
    assert torch.equal(run_graph(model, traced, batch).loss, model(**batch).loss)
