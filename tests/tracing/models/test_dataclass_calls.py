"""Dataclasses that layers return: keyword-only, growing, and read or replaced by the functions of ``dataclasses``."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


@dataclass(kw_only=True)
class State:
    loss: Any = None
    hidden: Any = None


@dataclass
class Growing:
    items: list[Tensor] = field(default_factory=list)
    loss: Any = None


class StateLayer(PlainLayer):
    def forward(self, state: Any) -> Any:
        return State(hidden=super().forward(state.hidden))


class GrowingLayer(PlainLayer):
    def forward(self, grown: Any) -> Any:
        return Growing([*grown.items, super().forward(grown.items[-1])])


class Model(PlainModel):
    """Calls ``between`` on the result of each layer."""

    def __init__(self, make: Callable[[Tensor], Any], layer: type[PlainLayer], between: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.make = make
        self.between = between

    def forward(self, x: Tensor) -> Any:
        value = self.make(self.embedding(x))
        for layer in self.layers:
            value = self.between(layer(value))
        return self.finish(value)

    def finish(self, value: Any) -> Any:
        hidden = value.hidden if isinstance(value, State) else value.items[-1]
        return self.head(hidden).mean()


def state(hidden: Tensor) -> State:
    return State(hidden=hidden)


def grown(hidden: Tensor) -> Growing:
    return Growing([hidden])


PLAIN: Any = (state, StateLayer, lambda value: value)


def append(value: Any) -> Any:
    value.items.append(value.items[-1] * 2)
    return value


BETWEEN: dict[type[PlainLayer], list[Callable[[Any], Any]]] = {
    StateLayer: [
        lambda value: replace(value, hidden=value.hidden * 2),
        lambda value: dataclasses.replace(value, loss=None),
        lambda value: State(hidden=getattr(value, dataclasses.fields(value)[1].name)),
        lambda value: State(**{f.name: getattr(value, f.name) for f in fields(value)}),
        lambda value: value if is_dataclass(value) else State(hidden=value * 2),
    ],
    GrowingLayer: [
        lambda value: Growing([*value.items, value.items[0] * 2]),
        lambda value: replace(value, items=[*value.items, value.items[-1]]),
    ],
}


@pytest.mark.parametrize("layer", [StateLayer, GrowingLayer])
def test_dataclasses_between_layers_are_exact(layer: type[PlainLayer]) -> None:
    def between(value: Any) -> Any:
        return functools.reduce(lambda made, function: function(made), BETWEEN[layer], value)

    model = Model(state if layer is StateLayer else grown, layer, between)
    assert_exact(model, {"x": torch.randn(4, 4)}, layer)


def test_a_change_of_a_list_that_a_layer_returned_is_refused() -> None:
    model = Model(grown, GrowingLayer, append)
    with pytest.raises(
        TracingError, match=r"\(append\)(.|\n)*test_dataclass_calls\.py:\d+, in append(.|\n)*Make a new"
    ):
        InProcessPipeline(model, 2, {"x": torch.randn(4, 4)}, transformer_layer_cls=GrowingLayer)


class SetsTheLoss(Model):
    def finish(self, value: Any) -> Any:
        value.loss = self.head(value.hidden).mean()
        return value


class ReturnsANewState(Model):
    def finish(self, value: Any) -> Any:
        return State(loss=self.head(value.hidden).mean(), hidden=value.hidden)


def test_a_field_of_an_output_that_a_layer_returned_is_refused_with_a_remedy() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(TracingError, match=r"SetsTheLoss\.forward sets .*\.loss.* Return a new object"):
        InProcessPipeline(SetsTheLoss(*PLAIN), 2, {"x": x}, transformer_layer_cls=StateLayer)
    # The remedy of the message.
    model = ReturnsANewState(*PLAIN)
    pipeline = InProcessPipeline(model, 2, {"x": x}, transformer_layer_cls=StateLayer)
    assert torch.equal(pipeline.train({"x": x}, 1)[0], model(x).loss)
