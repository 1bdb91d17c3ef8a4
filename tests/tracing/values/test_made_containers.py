"""Slices of containers, and containers that ``forward`` makes of the model's modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel

INPUTS = {"x": torch.arange(16.0).reshape(4, 4) / 16}


class Chain(PlainModel):
    """The layers are an ``nn.Sequential``."""

    chain: Any

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(*self.layers)
        del self.layers

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.through(self.embedding(x))).mean()
        return result

    def through(self, hidden: Tensor) -> Tensor:
        first: Tensor = self.chain[:1](hidden)
        for layer in self.chain[1:2]:
            hidden = layer(first) + first
        for layer in nn.ModuleList(self.chain)[2:3]:
            hidden = layer(hidden)
        hidden = self.chain[4:](hidden)
        return nn.Sequential(nn.Sequential(*self.chain[3:]), nn.Tanh())(hidden)  # type: ignore[no-any-return]


def test_slices_and_made_sequences_are_exact() -> None:
    assert_exact(Chain(), INPUTS, PlainLayer)


class Twice(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * 2  # type: ignore[no-any-return]


class MakesTwice(Chain):
    def through(self, hidden: Tensor) -> Tensor:
        return Twice(self.chain)(hidden)  # type: ignore[no-any-return]


class HasTwice(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice(self.chain)
        del self.chain

    def through(self, hidden: Tensor) -> Tensor:
        return self.twice(hidden)  # type: ignore[no-any-return]


def test_other_modules_are_made_in_the_constructor() -> None:
    with pytest.raises(TracingError, match=r"a Twice with parameters\. Make it in __init__; only an nn") as caught:
        assert_exact(MakesTwice(), INPUTS, PlainLayer)
    assert "autowrap" not in str(caught.value)
    assert_exact(HasTwice(), INPUTS, PlainLayer)
