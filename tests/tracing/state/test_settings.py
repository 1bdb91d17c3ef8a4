"""Attributes of modules above layers that change between two steps."""

import copy
import enum
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.state.reachable_state import ReachableState
from nxdpp.tracing.state.read_values import ReadValues
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


class Mode(enum.Enum):
    """A mode of a model."""

    PLAIN = 1
    DOUBLED = 2


def _same(loss: Tensor) -> Tensor:
    return loss


def _tripled(loss: Tensor) -> Tensor:
    return 3 * loss


class _Power:
    """An object of the user that can be called."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def __call__(self, loss: Tensor) -> Tensor:
        return loss**self.exponent


class Model(PlainModel):
    """Reads attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0, 2.0]
        self.pair = (1.0, 2.0)
        self.table = {"first": [1.0]}
        self.deep = SimpleNamespace(inner=SimpleNamespace(factor=1.0))
        self.array = numpy.ones(3)
        self.mode = Mode.PLAIN
        self.kind = torch.float32
        self.optional: float | None = None
        self.function: Callable[[Tensor], Tensor] = _same
        self.criterion: nn.Module = nn.MSELoss()
        self.plain_tensor = torch.ones(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) * self.plain_tensor * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        loss: Tensor = self.criterion(self.head(hidden.to(self.kind).float()), x[:, :1])
        loss = loss * self.weights[0] * self.pair[1] * self.table["first"][0] * self.deep.inner.factor
        loss = loss * float(self.array[1]) * (2 if self.mode is Mode.DOUBLED else 1)
        return self.function(loss if self.optional is None else loss + self.optional)


def _set_item(model: Any) -> None:
    model.weights[0] = 2.0


def _set_entry(model: Any) -> None:
    model.table["first"][0] = 2.0


def _set_deep(model: Any) -> None:
    model.deep.inner.factor = 2.0


def _set_array(model: Any) -> None:
    model.array[1] = 2.0


def _set(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        setattr(model, name, value)

    return change


def _hook(model: Any) -> None:
    model.register_forward_hook(lambda module, inputs, output: 2 * output)


def _replace_forward(model: Any) -> None:
    model.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), model)


CHANGES: dict[str, Callable[[Any], None]] = {
    "an item of a list": _set_item,
    "a list": _set("weights", [3.0]),
    "a tuple": _set("pair", (1.0, 3.0)),
    "an item of a list in a dict": _set_entry,
    "an attribute of an object of an object": _set_deep,
    "an element of an array": _set_array,
    "a member of an enumeration": _set("mode", Mode.DOUBLED),
    "a dtype": _set("kind", torch.bfloat16),
    "a number in the place of None": _set("optional", 2.0),
    "a function": _set("function", _tripled),
    "an object that is called": _set("function", _Power(2.0)),
    "a module without parameters": _set("criterion", nn.L1Loss()),
    "a tensor": _set("plain_tensor", torch.full((4,), 2.0)),
    "a buffer": _set("scale", torch.full((4,), 2.0)),
    "a hook": _hook,
    "forward of the instance": _replace_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_exact(change: str) -> None:
    model, x = Model(), torch.randn(4, 4)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    (before,) = pipeline.train({"x": x}, 1)
    graph = pipeline.programs.cut_graph({"x": x}, True)
    assert pipeline.programs.cut_graph({"x": x}, True) is graph
    whole = copy.deepcopy(model)
    model.zero_grad()

    CHANGES[change](model)
    CHANGES[change](whole)
    (loss,) = pipeline.train({"x": x}, 1)

    expected = whole(x)
    expected.backward()
    assert torch.equal(loss, expected)
    assert not torch.equal(loss, before)
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]
    assert pipeline.programs.cut_graph({"x": x}, True) is pipeline.programs.cut_graph({"x": x}, True) is not graph


def test_an_attribute_that_only_the_new_function_reads() -> None:
    model, x = Model(), torch.randn(4, 4)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    pipeline.train({"x": x}, 1)
    power: Any = _Power(2.0)
    model.function = power
    pipeline.train({"x": x}, 1)

    power.exponent = 3.0
    (loss,) = pipeline.train({"x": x}, 1)

    assert torch.equal(loss, model(x))


def test_only_attributes_that_code_names_count() -> None:
    model: Any = Model()
    values = _values(model)
    before, objects = values.number, values.objects

    model.other, model.weights = (5.0,), [1.0, 2.0]
    assert values.number == before

    model.weights.append(3.0)
    assert values.number != before
    assert values.objects == objects
    model.plain_tensor = torch.ones(4)
    assert values.number != before
    assert values.objects != objects


def test_large_and_circular_objects_are_looked_at_in_part() -> None:
    model: Any = Model()
    model.weights = [model.weights, *range(1000)]
    model.table["first"] = model.table
    model.deep.inner = [[[float(i)] * 90] * 90 for i in range(90)]

    values = _values(model)

    assert values.number == values.number


def _values(model: Any) -> ReadValues:
    spine = [model, model.layers]
    return ReadValues(spine, lambda: ReachableState(spine))
