"""The tracer of the spine: all modules beside the ancestors of layers are leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


def test_the_message_names_a_value_that_a_graph_cannot_hold() -> None:
    class Handing(PlainModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(x)
            for layer in self.layers:
                hidden = layer(hidden, Handing)
            return hidden  # type: ignore[no-any-return]

    model = Handing()
    with pytest.raises(TracingError, match=r"a type is handed on between layers.*\n  at .*test_spine.py:\d+"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))


class Bag:
    """An object that each layer makes anew."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass
class DataBag:
    hidden: torch.Tensor


class MakesABag(PlainLayer):
    def forward(self, bag: Any) -> Any:
        return type(bag)(super().forward(bag.hidden))


class WithBag(PlainModel):
    """Gives its layers an object that ``make`` makes."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MakesABag() for _ in range(4))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bag = self.make(self.embedding(x))
        for layer in self.layers:
            bag = layer(bag)
        result: torch.Tensor = self.head(bag.hidden).mean()
        return result


def test_an_object_of_the_user_is_refused_and_a_dataclass_is_exact() -> None:
    x = {"x": torch.ones(2, 4)}
    model = WithBag(Bag)
    with pytest.raises(TracingError, match=r"a Bag is handed on .*\. Make Bag a dataclass that each layer makes anew"):
        trace_with(model, x, options_for(model, MakesABag))
    assert_exact(WithBag(DataBag), x, MakesABag)
