"""The distance by which the zoo judges: differences that it must find."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training_distance import distance, gradient_distances, relative


class Trained(nn.Module):
    """Two tied weights and an untied one, all with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.own = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.embed.weight.grad = torch.ones(4, 4)
        self.own.weight.grad = torch.ones(4, 4)


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


def test_without_gradients_the_losses_are_compared() -> None:
    with torch.no_grad():
        assert _judge() == 0.0
        assert _judge(lambda model, losses: losses[1].mul_(1.5)) > 0.1


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


def test_a_missing_loss_is_an_error() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        _judge(lambda model, losses: losses.pop())


def test_a_reference_with_nan_is_infinitely_far() -> None:
    model, whole = _two()
    whole.linear.weight.data.fill_(math.nan)
    pipeline: Any = Pipeline(model)

    assert distance(pipeline, model, whole, {"x": torch.ones(4, 4)}, 2) == math.inf


@pytest.mark.parametrize("gradient", [None, 0.0])
def test_nothing_to_compare_is_an_error(gradient: float | None) -> None:
    model, whole = Trained(), Trained()
    for parameter in whole.parameters():
        parameter.grad = None if gradient is None else torch.zeros_like(parameter)

    with pytest.raises(RuntimeError, match="are zero or missing"):
        gradient_distances(model, whole)


def test_a_tied_weight_may_differ_by_rounding_and_no_more() -> None:
    model, whole = Trained(), Trained()
    assert gradient_distances(model, whole) == [0.0, 0.0, 0.0]

    model.embed.weight.grad = torch.ones(4, 4) * (1 + 3e-7)
    model.own.weight.grad = torch.ones(4, 4) * (1 + 3e-7)
    tied, own, _ = sorted(gradient_distances(model, whole), key=lambda x: x != 0.0)[::-1]
    assert sorted([tied, own])[0] == 0.0
    assert 1e-7 < sorted([tied, own])[1] < 1e-6

    model.embed.weight.grad[0, 0] = 1.00001
    assert max(gradient_distances(model, whole)) > 5e-6


def test_a_small_gradient_is_measured_by_itself() -> None:
    model, whole = Trained(), Trained()
    for each in (model, whole):
        each.own.weight.grad = torch.full((4, 4), 0.01)
    model.own.weight.grad = torch.full((4, 4), 0.0101)

    assert max(gradient_distances(model, whole)) == pytest.approx(0.01, rel=1e-3)


def test_shapes_that_differ_are_infinitely_far() -> None:
    assert relative(torch.ones(2), torch.ones(3), 1e-6) == math.inf
    assert relative(torch.ones(2), torch.full((2,), math.inf), 1e-6) == math.inf
