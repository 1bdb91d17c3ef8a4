"""Ranks with other values, other configurations or steps of their own: refused on all of them, without a hang."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import GradScaler, parallel_state
from nxdpp.nnscaler import ComputeConfig, ParallelModule, ParallelOptimizer, broadcast_weights, build_optimizer
from tests.doors.nnscaler.own_folders import VARIABLE, parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Mlp, Net, sample
from tests.support.run_ranks import run_ranks

RANKS = 2


def made(kind: type[nn.Module] = Mlp) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def loaded(**settings: Any) -> ParallelModule:
    model = parallelize(made(), {"data": sample(0)}, "dp", ComputeConfig(1, RANKS, use_end2end=True, **settings))
    assert isinstance(model, ParallelModule)
    return model


def built(model: nn.Module, **kwargs: Any) -> ParallelOptimizer:
    optimizer: Any = build_optimizer(model, torch.optim.Adam, lr=0.05, **kwargs)
    assert isinstance(optimizer, ParallelOptimizer)
    return optimizer


def test_ranks_that_differ() -> None:
    run_ranks(RANKS, _cases, timeout=200)


def _cases(rank: int) -> None:
    _first_configurations(rank)
    _plain_modules_with_other_values(rank)
    _values_loaded_on_one_rank(rank)
    _added_groups_are_refused()
    _scalers(rank)
    parallel_state.destroy_model_parallel()
    _other_seeds_in_a_unit(rank)


def _first_configurations(rank: int) -> None:
    """Configurations that differ in the first call, in which the ranks do not know each other yet."""
    config = ComputeConfig(1, RANKS, use_end2end=True, use_zero=rank == 1)
    own = Path(os.environ[VARIABLE]) / f"of rank {rank}"
    with pytest.raises(RuntimeError, match=r"on rank 1 use_zero is True, and False on rank 0. Give all ranks the same"):
        parallelize(made(), {"data": sample(0)}, "dp", config, gen_savedir=own)


def _plain_modules_with_other_values(rank: int) -> None:
    inner = parallelize(made(Net), {"x": sample(0)["data"]}, "dp", ComputeConfig(1, RANKS))
    assert isinstance(inner, ParallelModule)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
    optimizer = built(model)
    model(sample(rank)["data"]).sum().backward()
    with pytest.raises(RuntimeError, match=r"0.weight has other values on rank 1 than on rank 0.*broadcast_weights"):
        optimizer.step()
    broadcast_weights(model)
    optimizer.step()
    assert len({repr(value) for value in _everyones(model.state_dict()["0.weight"].tolist())}) == 1


def _values_loaded_on_one_rank(rank: int) -> None:
    model = loaded(use_zero=True)
    optimizer = built(model)
    other = Mlp().state_dict()
    if rank == 0:
        model.load_state_dict(other)
    model.train_step([sample(rank)])
    for call in (optimizer.sync_shard_grad, optimizer.clip_gnorm, optimizer.step):
        with pytest.raises(RuntimeError, match=r"layers.0.weight has other values on rank 1 than on rank 0"):
            call()
    # The remedy of the message.
    if rank == 1:
        model.load_state_dict(_everyones(other)[0])
    else:
        _everyones(other)
    optimizer.step()


def _added_groups_are_refused() -> None:
    optimizer = built(loaded(use_zero=True))
    with pytest.raises(RuntimeError, match="gradients of an added group would not be summed over the units"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 1


def _scalers(rank: int) -> None:
    """An overflow on one rank: torch's scaler would step on the others alone, and they would wait."""
    model, whole = loaded(), made()
    device = parallel_state.local_device().type
    # Fused optimizers scale the gradients themselves.
    optimizer = built(model, fused=True)
    theirs = torch.optim.Adam(whole.parameters(), lr=0.05)
    with pytest.raises(RuntimeError, match=r"would wait: take nxdpp.GradScaler"):
        _step_with_an_overflow(rank, model, optimizer, torch.amp.GradScaler(device, init_scale=1024.0))
    scaler = GradScaler(device, init_scale=1024.0)
    _step_with_an_overflow(rank, model, optimizer, scaler)
    assert scaler.get_scale() == 512.0
    model.train_step([sample(10 + rank)], scale_fn=scaler.scale)
    scaler.step(optimizer)
    scaler.update()
    for unit in range(RANKS):
        whole(sample(10 + unit)).backward()
    theirs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-5, atol=1e-6)


def _step_with_an_overflow(
    rank: int, model: ParallelModule, optimizer: ParallelOptimizer, scaler: torch.amp.GradScaler
) -> None:
    model.train_step([sample(rank)], scale_fn=scaler.scale)
    gradient = model.get_parameter("layers.0.weight").grad
    assert gradient is not None
    if rank == 1:
        gradient.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), self.rate, self.training)


def _other_seeds_in_a_unit(rank: int) -> None:
    x = sample(0)["data"]
    model = parallelize(made(WithDropout), {"x": x}, "tp", ComputeConfig(RANKS, RANKS))
    assert isinstance(model, ParallelModule)
    model.eval()
    torch.manual_seed(rank)
    model(x)
    model.train()
    with pytest.raises(RuntimeError, match="ranks 0 and 1 are in one unit and draw other random numbers"):
        model(x)
    whole = made(WithDropout)
    torch.manual_seed(5)
    ours = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(ours, whole(x))


def _everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(found, value)
    return found
