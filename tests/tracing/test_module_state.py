"""A forward that changes its own module is refused with its line, and the module is as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.trace import TracingOptions, trace
from tests.support.traced_models import run_graph

SPECS = {"x": InputSpec(2, torch.float32)}
OPTIONS = TracingOptions((nn.Linear,))


class Keeping(nn.Module):
    """Does ``change`` to itself before its layer runs."""

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


def moves_another(module: Any, x: Tensor) -> None:
    module.other = module.table.to(x.device)


def moves_to_what_is_computed(module: Any, x: Tensor) -> None:
    module.table = module.table.to(x * 2)


def counts_in_python(module: Any, x: Tensor) -> None:
    module.blocks_run += 1


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize(
    "change",
    [keeps_an_input, counts, takes_from_the_input, moves_another, moves_to_what_is_computed, counts_in_python],
)
def test_a_forward_that_keeps_what_it_computes_is_refused(change: Callable[[Any, Tensor], Any], tracer: str) -> None:
    module = Keeping(change)
    table, attributes = module.table, set(vars(module))
    with pytest.raises(
        TracingError, match=rf"forward (sets|changes) Keeping\.\w+ (to|from)(.|\n)*\.py:\d+, in {change.__name__}: "
    ):
        trace(module, SPECS, {}, TracingOptions((nn.Linear,), tracer_cls=tracer))
    assert module.table is table
    assert set(vars(module)) == attributes


def moves(module: Any, x: Tensor) -> None:
    module.table = module.table.to(device=x.device, dtype=torch.bfloat16)


def moves_twice(module: Any, x: Tensor) -> None:
    module.table = module.table.to(x.device)
    module.table = module.table.to(dtype=torch.half).to(x.device)


@pytest.mark.parametrize("change", [moves, moves_twice])
def test_a_buffer_that_is_moved_is_followed(change: Callable[[Any, Tensor], Any]) -> None:
    module, x = Keeping(change), torch.randn(3, 4)
    table = module.table
    graph = trace(module, SPECS, {}, OPTIONS)
    assert module.table is table
    with torch.no_grad():
        table.copy_(torch.tensor([1.001, 2.003, 3.007, 4.009]))  # not what the moved dtype can hold
    output = run_graph(module, graph, {"x": x})
    assert module.table is table
    assert torch.equal(output, module(x))


def moves_then_fails(module: Any, x: Tensor) -> None:
    moves(module, x)
    raise ValueError("later")


def test_a_trace_that_fails_leaves_no_traced_value_behind() -> None:
    module = Keeping(moves_then_fails)
    table = module.table
    with pytest.raises(TracingError, match="later"):
        trace(module, SPECS, {}, OPTIONS)
    assert module.table is table
    module.blocks = nn.ModuleList()  # attributes can be set as ever


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + torch.full((4,), 2.0)  # type: ignore[no-any-return]


def test_a_constant_that_plain_fx_would_keep_elsewhere_is_refused() -> None:
    with pytest.raises(TracingError, match=r"constants\n  at .*state.py:\d+, in forward: .*\nLeave tracer_cls out"):
        trace(Constant(), {"x": InputSpec(2, torch.float32)}, {}, TracingOptions((nn.Linear,), tracer_cls="torch"))
    assert trace(Constant(), {"x": InputSpec(2, torch.float32)}, {}, TracingOptions((nn.Linear,))).layers
