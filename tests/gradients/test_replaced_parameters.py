"""Errors for optimizers that hold replaced parameters, and for no others."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.gradients import replaced_parameters
from nxdpp.tensor.move_model_to_device import move_model_to_device


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Leave the objects of earlier tests out of the collection after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Other tests of the same process may hold replaced parameters.
    monkeypatch.setattr(replaced_parameters, "_replaced", WeakIdKeyDictionary())
    monkeypatch.setattr(replaced_parameters, "_step_check", None)
    yield
    gc.collect()
    assert len(replaced_parameters._replaced) == 0


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def test_a_refused_move_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    before = named(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"SGD.* Make the optimizer after move_model_to_device\(\)"):
        move_model_to_device(model, "meta")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    move_model_to_device(model, "cpu")
    optimizer.step()


def test_a_later_optimizer_of_old_parameters_fails_at_its_first_step() -> None:
    model = nn.Linear(2, 2)
    listed = list(model.parameters())
    move_model_to_device(model, "meta")
    stale = torch.optim.SGD(listed, lr=0.1)
    with pytest.raises(
        RuntimeError, match=r"SGD.* holds 2 parameters .*\(weight is the first\).* parameters\(\) of the wrapped"
    ):
        stale.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
