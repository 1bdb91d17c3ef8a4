"""Errors for optimizers that hold replaced parameters, and for no others."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.gradients import replaced_parameters
from nxdpp.gradients.followed_optimizers import followed_by_optimizers
from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds
from nxdpp.tensor.move_model_to_device import move_model_to_device
from tests.support.run_ranks import run_ranks


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


def test_the_error_names_optimizer_parameter_and_remedy() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([model.bias, torch.ones(1, requires_grad=True)])
    with pytest.raises(RuntimeError, match=r"AdamW.* holds 1 of the 2 parameters .*\(bias is the first\).* Do this\."):
        check_no_optimizer_holds(named(model), "Do this.")
    del optimizer
    check_no_optimizer_holds(named(model), "Do this.")


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


def shard(rank: int) -> None:
    dist.init_process_group()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    # The inner optimizer holds only this rank's share of the parameters.
    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer.* holds 4 of the 4 parameters"):
        check_no_optimizer_holds(named(model), "")
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer, keeps parameters in"), followed_by_optimizers(model):
        raise AssertionError("the block must not run")
    assert optimizer.param_groups
    # A rank that ends early would close connections that the other one still makes.
    dist.barrier()
    dist.destroy_process_group()


def test_an_optimizer_that_shards_its_state() -> None:
    run_ranks(2, shard)
