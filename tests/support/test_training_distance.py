"""The distance by which the zoo judges: differences that it must find."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training_distance import distance


class Whole(nn.Module):
    """A whole model with a Hugging Face output and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return type("Output", (), {"loss": self.norm(self.linear(x)).square().mean() + self.linear.weight.sum()})


class Pipeline:
    """Trains the model as a whole, then calls ``spoil`` with the model and its losses."""

    def __init__(self, model: nn.Module, spoil: Any = None) -> None:
        self._model = model
        self._spoil = spoil

    def train(self, batch: dict[str, torch.Tensor], parts: int, backward: bool) -> list[torch.Tensor]:
        losses = []
        for part in batch["x"].chunk(parts):
            losses.append(self._model(part).loss)
            if backward:
                (losses[-1] / parts).backward()
        losses = [loss.detach() for loss in losses]
        if self._spoil is not None:
            self._spoil(self._model, losses)
        return losses


def _two() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Whole()
    return model, copy.deepcopy(model)


def _judge(spoil: Any = None) -> float:
    model, whole = _two()
    pipeline: Any = Pipeline(model, spoil)
    return distance(pipeline, model, whole, {"x": torch.arange(32.0).view(8, 4)}, 2)


def _change(name: str, how: Any) -> Any:
    def spoil(model: nn.Module, losses: list[torch.Tensor]) -> None:
        how(model.get_parameter(name))

    return spoil


def test_equal_is_zero() -> None:
    assert _judge() == 0.0


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_change("linear.weight", lambda p: p.grad.mul_(2)), id="a gradient twice as large"),
        pytest.param(_change("linear.weight", lambda p: setattr(p, "grad", None)), id="a gradient that is missing"),
        pytest.param(_change("linear.weight", lambda p: p.grad.zero_()), id="a gradient of zeros"),
        pytest.param(_change("linear.weight", lambda p: p.grad[0].fill_(math.nan)), id="nan in a gradient"),
        pytest.param(lambda model, losses: losses[1].mul_(1.001), id="a loss"),
        pytest.param(lambda model, losses: losses[1].fill_(math.nan), id="nan as loss"),
        pytest.param(lambda model, losses: model.norm.running_mean.add_(1), id="a buffer"),
        pytest.param(lambda model, losses: model.norm.num_batches_tracked.add_(1), id="a count"),
    ],
)
def test_a_difference_is_wrong(spoil: Any) -> None:
    assert _judge(spoil) > 1e-5
