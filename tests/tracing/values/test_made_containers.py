"""Slices of containers, and containers that ``forward`` makes of the model's modules."""

from typing import Any

import torch
from torch import Tensor, nn

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
