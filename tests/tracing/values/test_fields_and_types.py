"""``None`` in fields and items of outputs, and types of values: the branch of one process, or an error."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from nxdpp.pipeline.stages.program_cache import _constants
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for

ROWS = 4


@dataclass
class Record:
    """Hidden states, and a mask for long inputs."""

    hidden: Tensor
    mask: Tensor | None = None


@dataclass
class Output(ModelOutput):
    """The same as transformers has it."""

    hidden: Tensor | None = None
    mask: Tensor | None = None


class Pair(NamedTuple):
    """The same, by position too."""

    hidden: Tensor
    mask: Tensor | None


@dataclass
class Statistics:
    """Fields with names of a tensor's methods and attributes."""

    hidden: Tensor
    mean: Tensor | None = None
    data: Tensor | None = None
    inner: Tensor | None = None


@dataclass
class Nested:
    """A record in a record."""

    record: Record


class Makes(nn.Module):
    """Makes an object of hidden states and a mask, which only inputs of many rows have."""

    def __init__(self, make: Callable[[Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]  # as users write it
        return self.make(self.linear(x), x > 0 if len(x) > ROWS else None)


class Masked(PlainModel):
    """Doubles hidden states that have no mask."""

    def __init__(self, make: Callable[[Tensor, Tensor | None], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embedding, self.read = Makes(make), read  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.read(self.embedding(x))
        hidden = hidden * 2 if mask is None else hidden * mask
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(hidden).mean()
        return result


def attributes(made: Any) -> tuple[Any, Any]:
    return made.hidden, made.mask


CASES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dataclass": (Record, attributes),
    "output": (lambda hidden, mask: Output(hidden=hidden, mask=mask), attributes),
    "named tuple": (Pair, attributes),
    "nested": (lambda hidden, mask: Nested(Record(hidden, mask)), lambda made: attributes(made.record)),
    "method": (lambda hidden, mask: Statistics(hidden, mean=mask), lambda made: (made.hidden, made.mean)),
    "another method": (lambda hidden, mask: Statistics(hidden, inner=mask), lambda made: (made.hidden, made.inner)),
    "attribute": (lambda hidden, mask: Statistics(hidden, data=mask), lambda made: (made.hidden, made.data)),
    "getattr": (lambda hidden, mask: Statistics(hidden, mean=mask), lambda made: (made.hidden, getattr(made, "mean"))),  # noqa: B009
    "used as a tensor": (
        lambda hidden, mask: Statistics(hidden, mean=mask),
        lambda made: (made.hidden.mean(1, keepdim=True) + made.hidden, made.mean),
    ),
    "get": (lambda hidden, mask: {"hidden": hidden, "mask": mask}, lambda made: (made["hidden"], made.get("mask"))),
    "get without": (
        lambda hidden, mask: {"hidden": hidden} | ({} if mask is None else {"mask": mask}),
        lambda made: (made["hidden"], made.get("mask")),
    ),
}


def check(model: nn.Module, x: Tensor, **options: Any) -> None:
    batch = {"x": x}
    pipeline = InProcessPipeline(model, 2, batch, options_for(model, PlainLayer, **options))
    for rows in (ROWS, ROWS + 2):
        inputs = {"x": torch.randn(rows, *x.shape[1:])}
        (loss,) = pipeline.train(inputs, 1)
        assert torch.equal(loss, model(**inputs))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [ROWS, ROWS + 2])
def test_none_in_a_field(case: str, rows: int) -> None:
    check(Masked(*CASES[case]), torch.randn(rows, 4))


class Attends(PlainModel):
    """Doubles what has no attention weights."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.embedding = nn.MultiheadAttention(4, 1, batch_first=True)  # type: ignore[assignment]
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        hidden, weights = self.embedding(x, x, x, need_weights=self.need_weights)
        if weights is None:
            hidden = hidden * 2
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(hidden).mean()
        return result


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_without_weights(need_weights: bool) -> None:
    check(Attends(need_weights), torch.randn(ROWS, 3, 4))


def long_mask(x: Tensor):  # type: ignore[no-untyped-def]  # as users write it
    return x > 0 if len(x) > ROWS else None


def masks(x: Tensor):  # type: ignore[no-untyped-def]
    return x + 1, x > 0 if len(x) > ROWS else None


class Calls(PlainModel):
    """Doubles its inputs where a function gives no mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask = long_mask(x)
        hidden = x * 2 if mask is None else x * mask
        more, mask = masks(hidden)
        return super().forward(more if mask is None else more * mask)


def test_a_wrapped_function_may_return_none() -> None:
    check(Calls(), torch.randn(ROWS, 4), autowrap_functions=(long_mask, masks))


class Returns(nn.Module):
    """A layer's input of any type."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        return self.make(self.linear(x))


class AsksTypes(PlainModel):
    """Asks for a type and does not use the value."""

    def __init__(self, read: Callable[[Any], Any], kind: Any, make: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.first, self.read, self.kind = Returns(make), read, kind

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if isinstance(self.read(self.first(x)), self.kind) else x)


READS: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Tensor], Any]]] = {
    "a size": (lambda x: x.size(0), int, lambda x: x),
    "a shape": (lambda x: x.shape, tuple, lambda x: x),
    "an item": (lambda x: x.sum().item(), float, lambda x: x),
    "a pair of results": (lambda x: x.max(dim=1), tuple, lambda x: x),
    "a tensor of a slice": (lambda x: x[:2], Tensor, lambda x: (x, x, x)),
    "a tuple": (lambda x: x, tuple, lambda x: (x, x)),
    "a tensor": (lambda x: x, Tensor, lambda x: (x, x)),
    "a number": (lambda x: x[1], Tensor, lambda x: (x, 3)),
}


@pytest.mark.parametrize("case", READS)
def test_the_type_of_an_unused_value(case: str) -> None:
    model = AsksTypes(*READS[case])
    x = torch.randn(ROWS, 4)
    try:
        pipeline = InProcessPipeline(model, 2, {"x": x}, options_for(model, PlainLayer))
        (loss,) = pipeline.train({"x": x}, 1)
    except Exception as error:
        assert "leaf_module_cls" in str(error)  # noqa: PT017
        assert case not in ("a size", "a shape")
        return
    assert torch.equal(loss, model(x))


class Draws(Returns):
    """Draws numbers of Python and NumPy when it runs."""

    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        random.random()
        numpy.random.rand()
        return self.linear(x), None


class AsksDrawing(PlainModel):
    """Asks for the second item of what a drawing module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Draws(lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.first(x)
        return super().forward(hidden if mask is None else hidden * mask)


def test_a_trace_draws_nothing() -> None:
    model = AsksDrawing()
    before = random.getstate(), [str(part) for part in numpy.random.get_state()]
    InProcessPipeline(model, 2, {"x": torch.randn(ROWS, 4)}, options_for(model, PlainLayer))
    assert (random.getstate(), [str(part) for part in numpy.random.get_state()]) == before


def test_zeros_of_two_signs_are_two_constants() -> None:
    assert _constants({"scale": 0.0}) != _constants({"scale": -0.0})
    assert _constants({"scale": 0.0}) == _constants({"scale": 0.0})
