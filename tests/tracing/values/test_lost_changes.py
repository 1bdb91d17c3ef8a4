"""Changes that tracing would lose are refused; others are in the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace
from nxdpp.tracing.sizes.input_specs import InputSpec
from tests.support.traced_models import run_graph


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
    [assign_through_a_view, multiply_a_view, multiply_the_data, change_under_a_view],
)
def test_a_change_that_would_be_lost_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TracingError, match=rf"in place.*\n.*test_lost_changes\.py:\d+, in {change.__name__}"):
        traced(change)


def assign(h: Tensor) -> Tensor:
    h[:, 0] = 7.0
    h[:, 1] = h[:, 0] * 2
    return h


def use_the_result(h: Tensor) -> Tensor:
    h = nn.functional.relu(h, inplace=True)
    return h.view(-1, 4)


def ask_for_gradients(h: Tensor) -> Tensor:
    kept = h.detach()
    view = kept[:, None]
    view.requires_grad = True
    return h + view.squeeze(1) + kept


def read_between(h: Tensor) -> Tensor:
    before = h.sum()
    h.mul_(2).add_(1)
    h[0] += before
    return h + h.sum()


def all_of_them(h: Tensor) -> Tensor:
    return ask_for_gradients(discard_the_result(use_the_result(read_between(assign(h)))))


def test_a_change_of_the_value_itself_is_kept() -> None:
    module = Changing(all_of_them)
    graph = trace(module, {"x": InputSpec(2, torch.float32)}, {}, TracingOptions((nn.Linear,))).graph
    x = torch.randn(3, 4)
    (output,) = torch.fx.GraphModule(module, graph)(x)
    assert torch.equal(output, module(x))


SPECS = {"x": InputSpec(2, torch.float32)}
OPTIONS = TracingOptions((nn.Linear,))


class Keeping(nn.Module):
    """Apply ``change`` to itself before its layer runs."""

    table: Tensor

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("table", torch.arange(4.0))
        self.blocks_run = 0

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.blocks[0](x + self.table.float()).sum()  # type: ignore[no-any-return]


def keeps_an_input(module: Any, x: Tensor) -> None:
    module.last = x


def counts(module: Any, x: Tensor) -> None:
    module.table += 1


def takes_from_the_input(module: Any, x: Tensor) -> None:
    module.table = x.to(module.table.dtype)


def counts_in_python(module: Any, x: Tensor) -> None:
    module.blocks_run += 1


@pytest.mark.parametrize(
    ("change", "tracer"),
    [(keeps_an_input, "torch")]
    + [(change, "hf") for change in (keeps_an_input, counts, takes_from_the_input, counts_in_python)],
)
def test_a_forward_that_keeps_a_computed_value_is_refused(change: Callable[[Any, Tensor], Any], tracer: str) -> None:
    module = Keeping(change)
    table, attributes = module.table, set(vars(module))
    with pytest.raises(
        TracingError, match=rf"forward (sets|changes) Keeping\.\w+ (to|from)(.|\n)*\.py:\d+, in {change.__name__}: "
    ):
        trace(module, SPECS, {}, TracingOptions((nn.Linear,), tracer_cls=tracer))
    assert module.table is table
    assert set(vars(module)) == attributes


def moves_twice(module: Any, x: Tensor) -> None:
    module.table = module.table.to(x.device)
    module.table = module.table.to(dtype=torch.half).to(x.device)


def test_a_buffer_that_is_moved_is_followed() -> None:
    module, x = Keeping(moves_twice), torch.randn(3, 4)
    table = module.table
    graph = trace(module, SPECS, {}, OPTIONS)
    assert module.table is table
    with torch.no_grad():
        table.copy_(torch.tensor([1.001, 2.003, 3.007, 4.009]))  # not exact in the dtype that it is moved to
    output = run_graph(module, graph, {"x": x})
    assert module.table is table
    assert torch.equal(output, module(x))
