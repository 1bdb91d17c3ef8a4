"""Copies of weights that autocast keeps, and the memory of nodes without them."""

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nxdpp.tracing.costs.node_parts import cached_casts
from nxdpp.tracing.costs.run_node import NodeRun


class Mixed(nn.Module):
    """A layer whose first weight autocast converts, and whose second weight its code converts."""

    def __init__(self) -> None:
        super().__init__()
        self.by_autocast = nn.Linear(8, 16, bias=False)
        self.by_code = nn.Parameter(torch.zeros(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.by_autocast(x), self.by_code.to(torch.bfloat16))


def _casts(enabled: bool) -> list[torch.Size]:
    with FakeTensorMode():
        module, x = Mixed(), torch.zeros(4, 8)
        run = NodeRun(fx.Graph().create_node("call_module", "layer"), module, (x,), {})
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return [copy.shape for copy in cached_casts(run)]


def test_a_copy_that_each_forward_makes_is_not_kept() -> None:
    assert _casts(enabled=True) == [torch.Size([16, 8])]


def test_nothing_is_converted_without_autocast() -> None:
    assert _casts(enabled=False) == []
