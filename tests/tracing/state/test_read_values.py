"""Plain values that the spine's code reads: a change between two steps gives another number."""

import enum
import logging
import math
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from os import getenv
from types import MethodType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from nxdpp.tracing.state import read_values
from tests.support import models
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel

SCALE = 1.0
TABLE: dict[str, Any] = {"round": math.floor}
LOGGED = 0
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=1.0)


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


@dataclass
class Loss:
    scale: float = 1.0
    unused: float = 1.0


@dataclass
class Options:
    loss: Loss = field(default_factory=Loss)
    scales: list[float] = field(default_factory=lambda: [1.0])


class Model(PlainModel):
    def __init__(self, read: Callable[["Model"], Any] = lambda model: 1.0) -> None:
        super().__init__()
        self.read = read
        self.config = LlamaConfig()
        self.options = Options()
        self.items = [[1.0], {"a": (1.0,)}]
        self.circle: list[Any] = []
        self.circle.append(self.circle)
        self.array = numpy.ones(2)
        self.mode, self.kind = Mode.ONE, torch.float32
        self.function: Callable[[], float] = partial(float, 1.0)
        self.power: Callable[[float], float] = Power(1.0)
        self.criterion: nn.Module = nn.MSELoss()
        self.plain_tensor = torch.ones(4)
        self.register_buffer("buffer", torch.ones(4))
        self.names = {"x"}
        self.cache: Any = None
        self.calls = 0

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * self.read(self)  # type: ignore[no-any-return]


def set_global(model: Any) -> None:
    global SCALE
    SCALE = 2.0


def method_of(scale: float) -> Callable[[], float]:
    return lambda: scale


class Power:
    """An object of the user that can be called."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def __call__(self, value: float) -> float:
        power: float = value**self.exponent
        return power


def doubled(model: Any, x: Tensor) -> Any:
    return 2 * type(model).forward(model, x)


def print_at_times(model: Any) -> float:
    if LOGGED % 1000 == 999:
        print("a long time")
    return 1.0


READS_AND_CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "global": (lambda m: SCALE, set_global),
    "function in a global": (lambda m: TABLE["round"](1.5), lambda m: TABLE.update(round=math.ceil)),
    "global of a module": (lambda m: models.VOCABULARY / 61, lambda m: setattr(models, "VOCABULARY", 122)),
    "context": (lambda m: CONTEXT.get(), lambda m: CONTEXT.set(2.0)),
    "two levels": (lambda m: m.options.loss.scale, lambda m: setattr(m.options.loss, "scale", 2.0)),
    "longer list": (lambda m: len(m.options.scales), lambda m: m.options.scales.append(2.0)),
    "tuple of a dict": (lambda m: m.items[1]["a"][0], lambda m: m.items[1].update(a=(2.0,))),
    "circle": (lambda m: len(m.circle), lambda m: m.circle.append(m.circle)),
    "configuration": (lambda m: m.config.vocab_size / 1e5, lambda m: setattr(m.config, "vocab_size", 2)),
    "array": (lambda m: float(m.array[0]), lambda m: m.array.fill(2)),
    "enum": (lambda m: m.mode.value, lambda m: setattr(m, "mode", Mode.TWO)),
    "function": (lambda m: m.function(), lambda m: setattr(m, "function", method_of(2.0))),
    "set": (lambda m: len(m.names), lambda m: m.names.add("y")),
    "none": (lambda m: 1.0 if m.cache is None else 2.0, lambda m: setattr(m, "cache", "set")),
    "new attribute": (lambda m: getattr(m, "late", 1.0), lambda m: setattr(m, "late", 2.0)),
    "computed variable": (
        lambda m: float(os.environ.get(f"OWN_{'SCALE'}", 1)),
        lambda m: os.environ.update(OWN_SCALE="2"),
    ),
    "variable by its name": (lambda m: float(getenv("OWN_NAMED", "1")), lambda m: os.environ.update(OWN_NAMED="2")),
    "dtype": (lambda m: (torch.ones(1, dtype=m.kind) / 3).float(), lambda m: setattr(m, "kind", torch.bfloat16)),
    "called object": (lambda m: m.power(3.0), lambda m: setattr(m, "power", Power(2.0))),
    "module": (
        lambda m: m.criterion(torch.ones(2), torch.full((2,), 4.0)),
        lambda m: setattr(m, "criterion", nn.L1Loss()),
    ),
    "tensor": (lambda m: m.plain_tensor, lambda m: setattr(m, "plain_tensor", torch.full((4,), 2.0))),
    "buffer": (lambda m: m.buffer, lambda m: setattr(m, "buffer", torch.full((4,), 2.0))),
    "hook": (lambda m: 1.0, lambda m: m.register_forward_hook(lambda module, inputs, output: 2 * output)),
    "forward": (lambda m: 1.0, lambda m: setattr(m, "forward", MethodType(doubled, m))),
}


def sum_of_all(model: Any) -> Any:
    return sum(read(model) for read, _ in READS_AND_CHANGES.values()) * 0.02


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OWN_SCALE", "1")
    monkeypatch.setenv("OWN_NAMED", "1")
    before = SCALE, models.VOCABULARY
    yield
    globals()["SCALE"], models.VOCABULARY = before
    TABLE["round"] = math.floor
    CONTEXT.set(1.0)


def test_a_value_that_changes_between_steps_is_exact() -> None:
    model = Model(sum_of_all)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    inputs = {"x": torch.randn(4, 4)}
    graph: Any = None
    before: Any = None
    changes: dict[str, Callable[[Any], Any]] = {"nothing": lambda model: None}
    changes |= {name: change for name, (_, change) in READS_AND_CHANGES.items()}
    for name, change in changes.items():
        change(model)
        model.zero_grad()
        (loss,) = pipeline.train(inputs, 1)
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        expected = model(**inputs)
        model.zero_grad()
        expected.backward()
        assert torch.equal(loss, expected), name
        assert before is None or not torch.equal(loss, before), name
        whole: list[Any] = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, gradients, whole)), name
        found = pipeline.programs.cut_graph(inputs, True)
        assert found is pipeline.programs.cut_graph(inputs, True) is not graph, name
        graph, before = found, loss


def count(model: Any) -> float:
    global LOGGED
    LOGGED += 1
    return 1.0


def test_values_that_code_does_not_read_make_no_graph() -> None:
    model = Model(count)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    inputs = {"x": torch.randn(4, 4)}
    first = pipeline.programs.cut_graph(inputs, True)
    for _ in range(3):
        count(model)
        model.calls += 1
        model.options.loss.unused += 1
        model.options = Options(model.options.loss)
        vars(model)["other"] = object()
        assert pipeline.programs.cut_graph(inputs, True) is first


def test_values_that_change_no_graph_keep_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_values, "_MANY", 5)
    model = Model(print_at_times)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    inputs = {"x": torch.randn(4, 4)}
    first = pipeline.programs.cut_graph(inputs, True)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            count(model)
            assert pipeline.programs.cut_graph(inputs, True) is first
    (warning,) = caplog.messages
    assert "LOGGED" in warning
    assert "as an input" in warning


def test_settings_of_a_transformers_model() -> None:
    model = models.make("mixtral").train()
    pipeline = InProcessPipeline(model, 2)
    batch, whole = models.padded_batch(2), models.reference(model)
    losses = []
    for with_routers, coefficient in ((False, 0.1), (True, 0.1), (True, 0.7)):
        for each in (model, whole):
            each.config.output_router_logits, each.router_aux_loss_coef = with_routers, coefficient
        (loss,) = pipeline.train(batch, 1)
        assert torch.equal(loss, whole(**batch).loss)
        losses.append(float(loss))
    assert len(set(losses)) == 3
