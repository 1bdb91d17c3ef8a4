"""Criteria that are given a list beside the tensors of the graph."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer


class _Criterion(nn.Module):
    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.fills = fills

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        if self.fills:
            others.append(x)
        return sum((other.mean() for other in others), x.square().mean())


class _WithEmptyList(nn.Module):
    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer() for _ in range(2))
        self.criterion = _Criterion(fills)

    def forward(self, x: Tensor) -> Tensor:
        others: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.criterion(x, others)
        return loss


def test_a_criterion_may_read_an_empty_list() -> None:
    torch.manual_seed(0)
    assert_exact(_WithEmptyList(False), {"x": torch.randn(4, 4)}, layer_class=PlainLayer)


def test_a_criterion_that_fills_an_empty_list_is_refused_in_the_step() -> None:
    pipeline = InProcessPipeline(_WithEmptyList(True), 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=PlainLayer)

    with pytest.raises(RuntimeError, match="a module fills a list that it is given"):
        pipeline.train({"x": torch.randn(4, 4)}, 2)
