"""Nodes that draw random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from nxdpp.tracing.graph.uses import draws_random_numbers


class Root(nn.Module):
    """Modules that nodes can call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.leaky = nn.RReLU()
        self.dropping = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


def _node(function: Callable[..., Any]) -> fx.Node:
    """The last node of ``function(x, y)`` before the output."""
    *_, last, _ = fx.Tracer().trace(function).nodes
    assert isinstance(last, fx.Node)
    return last


def test_a_module_that_drops_draws_random_numbers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    draws = [draws_random_numbers(graph.call_module(name, (x,)), Root()) for name in ("linear", "dropping", "leaky")]
    assert draws == [False, True, True]


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (nn.functional.dropout, True),
        (torch.rand_like, True),
        (lambda x: x.new_empty(3).uniform_(), True),
        (lambda x: x.zero_(), False),
        (lambda x: torch.native_dropout(x, 0.5, True), True),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: nn.functional.rrelu(x, training=True), True),
        (nn.functional.gelu, False),
        (torch.arange, False),
    ],
)
def test_a_function_that_draws_random_numbers(function: Any, draws: bool) -> None:
    assert draws_random_numbers(_node(lambda x, y: function(x)), Root()) is draws
