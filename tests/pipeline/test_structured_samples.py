"""Samples of any structure: each tensor in them is an input of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel
from tests.pipeline.test_samples import assert_trains_alike
from tests.support.plain_models import WIDTH, Base


class Pair(NamedTuple):
    """Two tensors."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    """A sample of a data set."""

    x: Tensor
    y: Tensor
    weight: float = 0.5


class OfAPair(Base):
    def forward(self, data: Any, scale: float = 1.0) -> tuple[Tensor, Any]:
        x, y = data
        hidden = self.through(self.blocks, self.embedding(x))
        return (self.head(hidden) - y).square().mean() * scale, [hidden]


class OfAttributes(Base):
    def forward(self, data: Any) -> Tensor:
        hidden = self.through(self.blocks, self.embedding(data.x))
        loss: Tensor = (self.head(hidden) - data.y).square().mean() * data.weight
        return loss


def pairs(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, 1, generator=generator)


def attributes(kind: Any) -> Callable[[int], Any]:
    return lambda number: kind(*pairs(number), weight=0.5 + number)


def namespace(number: int) -> SimpleNamespace:
    x, y = pairs(number)
    return SimpleNamespace(x=x, y=y, weight=2)


CASES: tuple[tuple[type[nn.Module], Callable[[int], Any]], ...] = (
    (OfAPair, lambda number: Pair(*pairs(number))),
    (OfAttributes, attributes(Sample)),
    (OfAttributes, namespace),
)


def test_structures_are_exact(one_rank: None) -> None:
    for model, sample in CASES:
        samples: list[dict[str, Any]] = [{"data": sample(number)} for number in range(2)]
        assert_trains_alike(model, samples, virtual_pipeline_size=2)
    settings: dict[str, Any] = {"gradient_reduction": "sum", "check_against_module": "first"}
    given: list[dict[str, Any]] = [{"data": pairs(0)}, {"data": list(pairs(1))}]
    assert_trains_alike(OfAPair, given, virtual_pipeline_size=2, **settings)


def test_other_kinds_are_refused(one_rank: None) -> None:
    pipeline = NxDPPModel(OfAPair(), num_microbatches=1, virtual_pipeline_size=2)
    for data, message in (
        ({1, 2}, r"input data is a set; a sample has tensors, .* dataclasses of these\. Make it one of them"),
        ([object()], r"input data\[0\] is a object; a sample has"),
    ):
        with pytest.raises(TypeError, match=message):
            pipeline.steps.train_samples([{"data": data}])
