"""Plain values that the spine's code reads: a change between two steps gives another number."""

import enum
import logging
import math
import os
from argparse import Namespace
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from os import environ, getenv
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tests.support import models
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel

SCALE = 1.0
TABLE: dict[str, Any] = {"loss": {"scale": 1.0}, "round": math.floor}
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


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class OpenDict(dict[str, Any]):
    """A dict with attributes, as configurations of some libraries."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Wrapping:
    """Looks its attributes up in others."""

    def __init__(self) -> None:
        self._content = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return vars(self)["_content"][name]


class Model(PlainModel):
    class_scale = 1.0

    def __init__(self, read: Callable[["Model"], Any] = lambda model: 1.0) -> None:
        super().__init__()
        self.read = read
        self.config = LlamaConfig()
        self.options = Options()
        self.deep = SimpleNamespace(a=Namespace(b=SimpleNamespace(scale=1.0)))
        self.items = [[1.0], {"a": (1.0,)}]
        self.slotted, self.open, self.wrapping = Slotted(), OpenDict(loss=OpenDict(scale=1.0)), Wrapping()
        self.array = numpy.ones(2)
        self.mode, self.fraction = Mode.ONE, Fraction(1)
        self.function: Callable[[], float] = partial(float, 1.0)
        self.root: Callable[[], float] = partial(pow, 1.0, 0.5)
        self.long = [1.0] * 2000
        self.names = {"x"}
        self.cache: Any = None
        self.calls = 0
        self.zero = 0.0

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * float(self.read(self))


def set_global(model: Any) -> None:
    global SCALE
    SCALE = 2.0


def method_of(scale: float) -> Callable[[], float]:
    return lambda: scale


def replace_function(model: Any) -> None:
    model.function = method_of(2.0)


def print_at_times(model: Any) -> float:
    if LOGGED % 1000 == 999:
        print("a long time")
    return 1.0


READS_AND_CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "global": (lambda m: SCALE, set_global),
    "entry of a global": (lambda m: TABLE["loss"]["scale"], lambda m: TABLE["loss"].update(scale=2.0)),
    "function in a global": (lambda m: TABLE["round"](1.5), lambda m: TABLE.update(round=math.ceil)),
    "global of this module": (lambda m: models.VOCABULARY / 61, lambda m: setattr(models, "VOCABULARY", 122)),
    "context": (lambda m: CONTEXT.get(), lambda m: CONTEXT.set(2.0)),
    "class attribute": (lambda m: m.class_scale, lambda m: setattr(type(m), "class_scale", 2.0)),
    "two levels": (lambda m: m.options.loss.scale, lambda m: setattr(m.options.loss, "scale", 2.0)),
    "new object": (lambda m: m.options.loss.scale, lambda m: setattr(m.options, "loss", Loss(2.0))),
    "four levels": (lambda m: m.deep.a.b.scale, lambda m: setattr(m.deep.a.b, "scale", 2.0)),
    "list of a list": (lambda m: m.items[0][0], lambda m: m.items[0].__setitem__(0, 2.0)),
    "longer list": (lambda m: len(m.options.scales), lambda m: m.options.scales.append(2.0)),
    "tuple of a dict": (lambda m: m.items[1]["a"][0], lambda m: m.items[1].update(a=(2.0,))),
    "slot": (lambda m: m.slotted.scale, lambda m: setattr(m.slotted, "scale", 2.0)),
    "dict with attributes": (lambda m: m.open.loss.scale, lambda m: m.open.loss.update(scale=2.0)),
    "__getattr__": (lambda m: m.wrapping.scale, lambda m: m.wrapping._content.update(scale=2.0)),
    "configuration": (lambda m: m.config.vocab_size, lambda m: setattr(m.config, "vocab_size", 2)),
    "array": (lambda m: m.array[0], lambda m: m.array.fill(2)),
    "enum": (lambda m: m.mode.value, lambda m: setattr(m, "mode", Mode.TWO)),
    "fraction": (lambda m: m.fraction, lambda m: setattr(m, "fraction", Fraction(2))),
    "partial": (lambda m: m.function(), lambda m: setattr(m, "function", partial(float, 2.0))),
    "partial of several": (lambda m: m.root(), lambda m: setattr(m, "root", partial(pow, 4.0, 0.5))),
    "function": (lambda m: m.function(), replace_function),
    "long list": (lambda m: m.long[-1], lambda m: setattr(m, "long", [*m.long[:-1], 2.0])),
    "set": (lambda m: len(m.names), lambda m: m.names.add("y")),
    "none": (lambda m: 1.0 if m.cache is None else 2.0, lambda m: setattr(m, "cache", "set")),
    "new attribute": (lambda m: getattr(m, "late", 1.0), lambda m: setattr(m, "late", 2.0)),
    "environment": (lambda m: os.environ["OWN_SCALE"], lambda m: os.environ.update(OWN_SCALE="2")),
    "computed variable": (lambda m: os.environ.get(f"OWN_{'SCALE'}"), lambda m: os.environ.update(OWN_SCALE="2")),
    "new variable": (lambda m: os.getenv("OWN_OTHER", "1"), lambda m: os.environ.update(OWN_OTHER="2")),
    "missing variable": (lambda m: 1 + ("OWN_OTHER" in os.environ), lambda m: os.environ.update(OWN_OTHER="")),
    "environment by its name": (lambda m: environ["OWN_SCALE"], lambda m: environ.update(OWN_SCALE="2")),
    "getenv by its name": (lambda m: getenv("OWN_SCALE"), lambda m: environ.update(OWN_SCALE="2")),
    "negative zero": (lambda m: numpy.copysign(1, m.zero), lambda m: setattr(m, "zero", -0.0)),
}


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OWN_SCALE", "1")
    monkeypatch.setenv("OWN_OTHER", "")
    monkeypatch.delenv("OWN_OTHER")
    before = SCALE, models.VOCABULARY, Model.class_scale
    yield
    globals()["SCALE"], models.VOCABULARY, Model.class_scale = before
    TABLE["loss"]["scale"], TABLE["round"] = 1.0, math.floor
    CONTEXT.set(1.0)


@pytest.mark.parametrize("case", READS_AND_CHANGES)
def test_a_value_that_changes_between_steps_is_exact(case: str) -> None:
    read, change = READS_AND_CHANGES[case]
    model = Model(read)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    x = torch.randn(4, 4)
    graphs = []
    for step in range(3):
        if step == 2:
            change(model)
        assert torch.equal(torch.stack(pipeline.train({"x": x}, 1))[0], model(x))
        graphs.append(pipeline.programs.cut_graph({"x": x}, True))
    assert graphs[0] is graphs[1]
    assert graphs[1] is not graphs[2]


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


def test_values_that_change_no_graph_keep_it(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(print_at_times)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    inputs = {"x": torch.randn(4, 4)}
    first = pipeline.programs.cut_graph(inputs, True)
    with caplog.at_level(logging.WARNING):
        for _ in range(25):
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
    for with_routers, coefficient in ((False, 0.1), (True, 0.1), (True, 0.1), (True, 0.7)):
        for each in (model, whole):
            each.config.output_router_logits, each.router_aux_loss_coef = with_routers, coefficient
        (loss,) = pipeline.train(batch, 1)
        assert torch.equal(loss, whole(**batch).loss)
        losses.append(float(loss))
    assert len(set(losses)) == 3
