"""Tensors in dicts and plain attributes whose methods take a size of the inputs."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.traced_models import PlainModel, run_graph, trace_with

TABLE = torch.arange(4.0)


class Keeps(PlainModel):
    """Adds a kept row to each row of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"row": TABLE}

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.rows(hidden.shape[0])

    def rows(self, count: Any) -> torch.Tensor:
        return self.kept["row"].unsqueeze(0).expand(count, -1)


class Repeats(Keeps):
    def rows(self, count: Any) -> torch.Tensor:
        return self.kept["row"].repeat(count, 1)


class Reshapes(Keeps):
    def rows(self, count: Any) -> torch.Tensor:
        return self.kept["row"].repeat(2).reshape(count, 4)


class Makes(Keeps):
    def rows(self, count: Any) -> torch.Tensor:
        return self.kept["row"].new_ones((count, 4)) * 2


@pytest.mark.parametrize("make", [Keeps, Repeats, Reshapes, Makes])
def test_a_kept_tensor_takes_a_size_of_the_inputs(make: type[nn.Module]) -> None:
    model = make()
    traced = trace_with(model, {"x": torch.randn(3, 4)})

    x = torch.randn(2, 4)
    assert torch.equal(run_graph(model, traced, {"x": x}), model(x))


def test_tensors_have_their_methods_afterwards() -> None:
    before = dict(vars(torch.Tensor))
    trace_with(Keeps(), {"x": torch.randn(3, 4)})
    assert dict(vars(torch.Tensor)) == before
