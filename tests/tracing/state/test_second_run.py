"""State and randomness outside layers that a trace would freeze are refused; the model is unchanged afterwards."""

import itertools
import time
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with

CALLS = 0
TABLES: dict[Any, torch.Tensor] = {}
GENERATOR = Random(0)
ITERATOR = itertools.count()


class Model(PlainModel):
    """Multiplies its hidden states by a number that ``draw`` returns."""

    calls_of_all = 0

    def __init__(self, draw: Callable[["Model"], Any]) -> None:
        super().__init__()
        self.draw = draw
        self.history: list[Any] = []
        self.random = Random(0)
        self.legacy_random = numpy.random.RandomState(0)

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * self.draw(self)  # type: ignore[no-any-return]


def a_global(model: Any) -> int:
    global CALLS
    CALLS += 1
    return CALLS


def a_list(model: Any) -> int:
    model.history.append(0)
    return len(model.history)


def a_class_attribute(model: Any) -> int:
    Model.calls_of_all += 1
    return Model.calls_of_all


def counting() -> Callable[[Any], int]:
    calls = 0

    def a_closure(model: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return a_closure


CHANGES: dict[str, Callable[[Any], Any]] = {
    function.__name__: function for function in (a_global, a_list, a_class_attribute, counting())
}
DRAWS: dict[str, Callable[[Any], Any]] = {
    "own Random": lambda model: model.random.random(),
    "global Random": lambda model: GENERATOR.random(),
    "own RandomState": lambda model: float(model.legacy_random.rand()),
    "time": lambda model: time.time(),
    "iterator": lambda model: next(ITERATOR),
}


def _trace(model: nn.Module, **options: Any):  # type: ignore[no-untyped-def]
    return trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer, **options))


@pytest.mark.parametrize("name", [*CHANGES, *DRAWS])
def test_a_number_that_differs_between_two_runs_is_refused(name: str) -> None:
    """And the state is as before the trace: the next number is the one after the last."""
    draw = (CHANGES | DRAWS)[name]
    model = Model(draw)
    last = draw(model) if name in CHANGES else 0
    for tracer in ("hf", "torch") if name == "a_global" else ("hf",):
        with pytest.raises(TracingError, match=r"two runs(.|\n)* at .*test_second_run\.py:\d+, in "):
            _trace(model, tracer_cls=tracer)
    assert name in DRAWS or draw(model) == last + 1


class Skips(PlainModel):
    """Decides about its hidden states by a number that the graph does not have."""

    def __init__(self, decide: Callable[["Skips"], bool]) -> None:
        super().__init__()
        self.decide = decide
        self.state = {"calls": 0}
        self.random = Random(0)

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * 2 if self.decide(self) else hidden


def after_a_thousand_calls(model: Any) -> bool:
    model.state["calls"] += 1
    return model.state["calls"] > 1000  # type: ignore[no-any-return]


def once_in_a_million(model: Any) -> bool:
    return model.random.random() < 1e-6  # type: ignore[no-any-return]


@pytest.mark.parametrize("decide", [after_a_thousand_calls, once_in_a_million])
def test_a_number_that_is_only_compared_is_refused(decide: Callable[[Any], bool]) -> None:
    with pytest.raises(TracingError, match=r"Skips\.(state|random)"):
        _trace(Skips(decide))


class Keeps(PlainModel):
    """Keeps a value of a step for the next one."""

    def __init__(self, change: Callable[["Keeps", Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.state: dict[Any, Any] = {}
        self.history: list[Any] = []
        self.scale = nn.Parameter(torch.ones(4))

    def prepare(self, hidden: Tensor) -> Tensor:
        return self.change(self, hidden)


def in_a_global(model: Any, hidden: Tensor) -> Tensor:
    if "h" in TABLES:
        return TABLES["h"].tanh()
    TABLES["h"] = hidden
    return hidden


def of_a_parameter(model: Any, hidden: Tensor) -> Tensor:
    if "scale" not in model.state:
        model.state["scale"] = model.scale * 2
    return hidden * model.state["scale"]  # type: ignore[no-any-return]


def a_table_by_length(model: Any, hidden: Tensor) -> Tensor:
    length = int(hidden.shape[0])
    if length not in TABLES:
        TABLES[length] = torch.arange(hidden.shape[0]).unsqueeze(1)
    return hidden * TABLES[length]


@pytest.mark.parametrize("change", [in_a_global, of_a_parameter, a_table_by_length])
def test_a_value_of_an_earlier_step_is_refused(change: Callable[[Any, Tensor], Tensor]) -> None:
    model = Keeps(change)
    with pytest.raises(TracingError, match=r"(?s)earlier.* at .*\.py:\d+, in "):
        _trace(model)
    assert not model.state
    assert not TABLES


@lru_cache
def _table(length: int) -> Tensor:
    return torch.arange(length)


def a_table_of_a_cached_function(model: Any, hidden: Tensor) -> Tensor:
    return hidden * _table(4)


def values_of_this_step(model: Any, hidden: Tensor) -> Tensor:
    model.history = []
    for factor in range(3):
        model.history.append(hidden * factor)
    return sum(model.history) + model.history[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [a_table_of_a_cached_function, values_of_this_step])
def test_a_table_without_data_is_computed_in_each_step(change: Callable[[Any, Tensor], Tensor]) -> None:
    model = Keeps(change)
    for _ in range(2):
        traced = _trace(model)
        assert not model.state
        assert not TABLES
        assert model.history == []
    x = torch.randn(3, 4)
    output = run_graph(model, traced, {"x": x})
    assert not model.state
    assert not TABLES
    assert torch.equal(output, model(x))
    TABLES.clear()
    _table.cache_clear()


class WrittenOnly(PlainModel):
    """Counts its calls for its user alone."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}
        self.history: list[Any] = []

    def prepare(self, hidden: Tensor) -> Tensor:
        self.state["calls"] += 1
        self.history.append(hidden.shape)
        return hidden


def test_changes_that_the_spine_only_writes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = WrittenOnly()
    traced = _trace(model)
    messages = sorted(record.getMessage() for record in caplog.records)
    assert [message.partition(",")[0] for message in messages] == [
        "WrittenOnly.forward changes history", "WrittenOnly.forward changes state",
    ]  # fmt: skip
    assert all("In a pipeline it stays as it is. Return the value from forward" in message for message in messages)
    assert model.state == {"calls": 0}
    assert not model.history
    x = torch.randn(3, 4)
    assert torch.equal(run_graph(model, traced, {"x": x}), model(x))


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls.clone()


class Draws(nn.Module):
    """Draws a number in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.random.random()


class Remembers(nn.Module):
    """Adds its last input."""

    last: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x.detach()
        return x + last  # type: ignore[no-any-return]


class Remedied(PlainModel):
    """Has its state in a module without layers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def prepare(self, hidden: Tensor) -> Tensor:
        return self.module(hidden)  # type: ignore[no-any-return]


def test_state_in_a_module_without_layers_is_exact() -> None:
    assert_exact(Remedied(nn.Sequential(Counter(), Draws(), Remembers())), {"x": torch.randn(4, 4)}, PlainLayer)
