"""Order in which code uses the parts of a module."""

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from nxdpp.tracing.code.order import parts_in_order
from tests.support.models import llama


def _decorated(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Parts(nn.Module):
    """Parts that are registered in an order other than that of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2))
        self.tower = nn.Linear(2, 2)

    @_decorated
    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.tower(x) * self.scale
        return encoded

    @_decorated
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.encode(x)))
        return result


def test_parts_are_in_the_order_of_their_first_use() -> None:
    assert parts_in_order(Parts()) == ["tower", "scale", "body", "head"]


class Loops(Parts):
    def encode(self, x: Tensor) -> Tensor:
        return self.forward(self.tower(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if len(x) else self.encode(x)


def test_methods_that_call_each_other_have_an_end() -> None:
    assert parts_in_order(Loops()) == ["head", "tower"]


def test_a_module_without_code_of_its_own_has_no_order() -> None:
    assert parts_in_order(nn.ModuleList([nn.Linear(2, 2)])) == []
    assert parts_in_order(llama().model) == ["embed_tokens", "rotary_emb", "layers", "norm"]
