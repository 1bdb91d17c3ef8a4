"""A forward that changes its own module is refused, and the module is as it was."""

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.kinds import InputKind
from nxdpp.tracing.trace import TracingOptions, trace


class Counting(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = x
        return self.blocks[0](x)  # type: ignore[no-any-return]


def test_a_forward_that_keeps_what_it_computes_is_refused() -> None:
    module = Counting()
    steps = module.steps
    with pytest.raises(TracingError, match=r"Counting\.last, Counting\.steps.*would be\s+lost"):
        trace(module, {"x": InputKind(2, torch.float32)}, {}, TracingOptions((nn.Linear,)))
    assert module.steps is steps
    assert not hasattr(module, "last")


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + torch.full((4,), 2.0)  # type: ignore[no-any-return]


def test_a_constant_that_plain_fx_would_keep_elsewhere_is_refused() -> None:
    with pytest.raises(TracingError, match=r"Leave tracer_cls out"):
        trace(Constant(), {"x": InputKind(2, torch.float32)}, {}, TracingOptions((nn.Linear,), tracer_cls="torch"))
    assert trace(Constant(), {"x": InputKind(2, torch.float32)}, {}, TracingOptions((nn.Linear,))).layers
