"""Metadata arguments of nodes, and nodes that draw random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from nxdpp.tracing.graph.uses import draws_random_numbers, metadata_arguments

# embed_dim, heads, in_proj and its bias, bias_k and bias_v, add_zero_attn, dropout_p, out_proj and its bias.
_ATTENTION: Any = (2, 1, torch.ones(6, 2), torch.ones(6), None, None, False, 0.1, torch.ones(2, 2), torch.ones(2))


class Root(nn.Module):
    """Modules that nodes can call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.leaky, self.pooling = nn.RReLU(), nn.MaxPool1d(2)
        self.dropping = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


def _node(function: Callable[..., Any]) -> fx.Node:
    """The last node of ``function(x, y)`` before the output."""
    *_, last, _ = fx.Tracer().trace(function).nodes
    assert isinstance(last, fx.Node)
    return last


def _metadata(function: Callable[..., Any]) -> set[str]:
    return {node.name for node in metadata_arguments(_node(function), Root())}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.shape,
        lambda x, y: x.dtype,
        lambda x, y: x.device,
        lambda x, y: x.ndim,
        lambda x, y: x.size(),
        lambda x, y: x.size(0),
        lambda x, y: x.dim(),
        lambda x, y: x.numel(),
        lambda x, y: x.new_zeros(3),
        lambda x, y: torch.zeros_like(x),
        lambda x, y: torch.empty_like(x, dtype=torch.float64),
        lambda x, y: y.to(x),
        lambda x, y: y.type_as(x),
        lambda x, y: y.expand_as(x),
    ],
)
def test_the_data_of_x_is_not_used(function: Callable[..., Any]) -> None:
    assert _metadata(function) == {"x"}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + 1,
        lambda x, y: x.to(torch.float64),
        lambda x, y: x.expand(2, 2),
        lambda x, y: x.T,
        lambda x, y: torch.full_like(y, x),
        lambda x, y: x[0],
    ],
)
def test_the_data_of_x_is_used(function: Callable[..., Any]) -> None:
    used = _metadata(function)

    assert used <= {"y"}


@pytest.mark.parametrize(
    ("name", "draws"),
    [("linear", False), ("dropping", True), ("leaky", True), ("pooling", False)],
)
def test_a_module_that_drops_draws_random_numbers(name: str, draws: bool) -> None:
    graph = fx.Graph()
    node = graph.call_module(name, (graph.placeholder("x"),))

    assert draws_random_numbers(node, Root()) is draws


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (nn.functional.dropout, True),
        (nn.functional.dropout1d, True),
        (nn.functional.alpha_dropout, True),
        (torch.rand_like, True),
        (torch.poisson, True),
        (lambda x: torch.randint_like(x, 5), True),
        (lambda x: torch.native_dropout(x, 0.5, True), True),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: nn.functional.rrelu(x, training=True), True),
        (nn.functional.gumbel_softmax, True),
        (lambda x: nn.functional.fractional_max_pool2d(x, 2, output_size=2), True),
        (lambda x: nn.functional.multi_head_attention_forward(x, x, x, *_ATTENTION), True),
        (nn.functional.gelu, False),
        (lambda x: nn.functional.max_pool2d(x, 2), False),
        (nn.functional.softmax, False),
        (torch.arange, False),
    ],
)
def test_a_function_that_draws_random_numbers(function: Any, draws: bool) -> None:
    assert draws_random_numbers(_node(lambda x, y: function(x)), Root()) is draws


def test_a_method_that_draws_random_numbers() -> None:
    assert draws_random_numbers(_node(lambda x, y: x.new_empty(3).uniform_()), Root())
    assert draws_random_numbers(_node(lambda x, y: x.bernoulli()), Root())
    assert draws_random_numbers(_node(lambda x, y: x.random_(3)), Root())
    assert not draws_random_numbers(_node(lambda x, y: x.zero_()), Root())
