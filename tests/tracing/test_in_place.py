"""Changes in place are kept where the graph keeps them, and refused where it would lose them."""

from collections.abc import Callable

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.trace import TracedGraph, TracingOptions, trace


class Changing(nn.Module):
    """Changes the hidden state between its layers."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.blocks[1](self.change(self.blocks[0](x)))
        return hidden


def traced(change: Callable[[Tensor], Tensor]) -> TracedGraph:
    options = TracingOptions((nn.Linear,))
    return trace(Changing(change), {"x": InputSpec(2, torch.float32)}, {}, options)


def assign_through_a_view(h: Tensor) -> Tensor:
    h[:, 0][:] = 7.0
    return h


def fill_through_a_view(h: Tensor) -> Tensor:
    h[:, 0].fill_(3.0)
    return h


def multiply_a_view(h: Tensor) -> Tensor:
    view = h.view(-1)
    view.mul_(2)
    return h


def multiply_the_data(h: Tensor) -> Tensor:
    h.data.mul_(2)
    return h


def discard_the_result(h: Tensor) -> Tensor:
    nn.functional.relu(h, inplace=True)
    return h


def change_under_a_view(h: Tensor) -> Tensor:
    view = h.transpose(0, 1)
    h.add_(1)
    return h + view.transpose(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        assign_through_a_view,
        fill_through_a_view,
        multiply_a_view,
        multiply_the_data,
        discard_the_result,
        change_under_a_view,
    ],
)
def test_a_change_that_would_be_lost_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TracingError, match=rf"in place.*\n.*test_in_place\.py:\d+, in {change.__name__}"):
        traced(change)


def assign(h: Tensor) -> Tensor:
    h[:, 0] = 7.0
    h[:, 1] = h[:, 0] * 2
    return h


def chain_of_methods(h: Tensor) -> Tensor:
    h.mul_(2).add_(1)
    return h


def use_the_result(h: Tensor) -> Tensor:
    h = nn.functional.relu(h, inplace=True)
    return h.view(-1, 4)


@pytest.mark.parametrize("change", [assign, chain_of_methods, use_the_result])
def test_a_change_of_the_value_itself_is_kept(change: Callable[[Tensor], Tensor]) -> None:
    module = Changing(change)
    graph = trace(module, {"x": InputSpec(2, torch.float32)}, {}, TracingOptions((nn.Linear,))).graph
    x = torch.randn(3, 4)
    (output,) = torch.fx.GraphModule(module, graph)(x)
    assert torch.equal(output, module(x))


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad", "inference_mode"])
def test_a_mode_that_would_be_lost_is_refused(mode: str) -> None:
    def change(h: Tensor) -> Tensor:
        with getattr(torch, mode)():
            return h * 2

    with pytest.raises(TracingError, match=rf"torch\.{mode} is used outside the transformer layers"):
        traced(change)
