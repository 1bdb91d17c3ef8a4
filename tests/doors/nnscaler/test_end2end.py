"""Checks of forward's arguments and of the loss."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.doors.nnscaler.end2end import check_forward, loss_of
from tests.doors.nnscaler.trained_modules import Mlp, Net


class PositionalOnly(nn.Module):
    def forward(self, x: torch.Tensor, /, y: int = 1) -> torch.Tensor:
        return x * y


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.mark.parametrize(
    ("module", "given", "is_end2end", "message"),
    [
        (PositionalOnly, {"x": 1}, False, "positional-only argument x"),
        (Net, {"x": 1, "z": 1}, False, "has z, and Net.forward takes x, power"),
        (Net, {"power": 1}, False, "lacks x"),
        (TwoInputs, {"x": 1, "y": 1}, True, "its argument y has no default"),
        (Mlp, {"data": {}, "power": 2}, True, "leave power out of dummy_forward_args"),
        (Anything, {"x": 1}, True, "first argument of Anything.forward that takes the sample"),
    ],
)
def test_a_forward_that_does_not_fit_is_refused(
    module: type[nn.Module], given: dict[str, Any], is_end2end: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_forward(module, given, is_end2end)


def test_forwards_that_fit() -> None:
    check_forward(Net, {"x": 1}, False)
    check_forward(Net, {"x": 1, "power": 2}, False)
    check_forward(TwoInputs, {"x": 1, "y": 1}, False)
    check_forward(Anything, {"x": 1}, False)
    check_forward(Mlp, {"data": {}}, True)


@pytest.mark.parametrize("given", [[1], {1: 2}, None])
def test_dummy_arguments_are_a_dict_of_names(given: Any) -> None:
    with pytest.raises(TypeError, match="dict from the names of forward's arguments"):
        check_forward(Net, given, False)


def test_the_loss_is_the_first_value() -> None:
    loss = torch.ones(())
    for output in (loss, (loss, 1), [loss], {"hidden": 1, "loss": loss}):
        assert loss_of(output) is loss


@pytest.mark.parametrize("output", [torch.ones(2), (1, torch.ones(())), {"hidden": torch.ones(())}, [], None])
def test_an_output_without_a_scalar_loss_is_refused(output: Any) -> None:
    with pytest.raises(RuntimeError, match="must return a scalar loss first"):
        loss_of(output)
