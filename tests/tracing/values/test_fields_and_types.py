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
    """A field with the name of a method of a tensor."""

    hidden: Tensor
    mean: Tensor | None = None


class Makes(nn.Module):
    """Makes an object of hidden states and a mask, which only inputs of many rows have."""

    def __init__(self, make: Callable[[Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]  # as users write it
        return self.make(self.linear(x), x > 0 if len(x) > ROWS else None)


class Masked(PlainModel):
    """Doubles hidden states that have no mask, for each of ``CASES``."""

    def __init__(self) -> None:
        super().__init__()
        self.makers = nn.ModuleList(Makes(make) for make, _ in CASES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for make, (_, read) in zip(self.makers, CASES, strict=True):
            hidden, mask = read(make(hidden))
            hidden = hidden * 2 if mask is None else hidden * mask
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(hidden).mean()
        return result


def attributes(made: Any) -> tuple[Any, Any]:
    return made.hidden, made.mask


CASES: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
    (Record, attributes),
    (lambda hidden, mask: Output(hidden=hidden, mask=mask), attributes),
    (Pair, attributes),
    (
        lambda hidden, mask: Statistics(hidden, mean=mask),
        lambda made: (made.hidden.mean(1, keepdim=True) + made.hidden, getattr(made, "mean")),  # noqa: B009
    ),
    (lambda hidden, mask: {"hidden": hidden, "mask": mask}, lambda made: (made["hidden"], made.get("mask"))),
    (
        lambda hidden, mask: {"hidden": hidden} | ({} if mask is None else {"mask": mask}),
        lambda made: (made["hidden"], made.get("mask")),
    ),
]


def check(model: nn.Module, x: Tensor, **options: Any) -> None:
    batch = {"x": x}
    pipeline = InProcessPipeline(model, 2, batch, options_for(model, PlainLayer, **options))
    for rows in (ROWS, ROWS + 2):
        inputs = {"x": torch.randn(rows, *x.shape[1:])}
        (loss,) = pipeline.train(inputs, 1)
        assert torch.equal(loss, model(**inputs))


@pytest.mark.parametrize("rows", [ROWS, ROWS + 2])
def test_none_in_a_field(rows: int) -> None:
    check(Masked(), torch.randn(rows, 4))


class Returns(nn.Module):
    """A layer's input of any type."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        return self.make(self.linear(x))


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
