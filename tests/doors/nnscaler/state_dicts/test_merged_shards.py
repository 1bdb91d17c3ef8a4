"""Merged states of ZeRO: shards of two units become the state of one process, and that of other plans."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nnscaler.state_dicts.extra_state import (
    EXTRA_STATE_KEY,
    add_optimizer_extra_state,
    take_optimizer_extra_state,
)
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.nnscaler import (
    ComputeConfig,
    ParallelModule,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
    merge_state_dicts,
)
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import batch, make

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Odd sizes, so that shards begin inside rows; a parameter without dimensions, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)
        self.second = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return values (B, 5) of ``x`` (B, 6)."""
        return self.second((self.first(x) * self.scale).relu() * self.frozen)  # type: ignore[no-any-return]


def _whole(seed: int, dtype: torch.dtype) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def _loss(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    loss: torch.Tensor = (module(X.to(dtype)) * WEIGHTS.to(dtype)).square().sum()
    return loss


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    optimizer.zero_grad()
    _loss(module, dtype).backward()
    optimizer.step()


def _parallel(seed: int, dtype: torch.dtype) -> ParallelModule:
    module = parallelize(_whole(seed, dtype), {"x": X.to(dtype)}, "dp", ComputeConfig(1, 4))
    assert isinstance(module, ParallelModule)
    return module


def _sharded(module: nn.Module, lr: float = 0.01) -> Zero1Optimizer:
    return Zero1Optimizer(module.parameters(), torch.optim.Adam, grad_clipping=False, lr=lr)


def _states(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return module.state_dict(), add_optimizer_extra_state(module, optimizer, optimizer.state_dict())


def _merged(states: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    everyones = parallel_state.get_exchange().gather(states)
    module, optimizer = merge_state_dicts([each[0] for each in everyones], [each[1] for each in everyones])
    assert optimizer is not None
    return module, optimizer


def _assert_state(one: Any, other: Any, error: float = 0.0) -> None:
    assert sorted(one) == sorted(other)
    for index, values in one.items():
        assert sorted(values) == sorted(other[index])
        for key, value in values.items():
            expected = other[index][key].cpu()
            torch.testing.assert_close(value.cpu(), expected, rtol=error, atol=error, msg=f"{key} of {index}")


def _cases(rank: int) -> None:
    _four_units(rank)
    parallel_state.destroy_model_parallel()
    _masters(rank)
    parallel_state.destroy_model_parallel()
    _fused(rank)


def _four_units(rank: int) -> None:
    """Shards of four units: equal to one process to the bit, and to the one that goes on from there."""
    whole = _whole(0, torch.float32)
    reference = torch.optim.Adam(whole.parameters(), lr=0.01)
    module = _parallel(0, torch.float32)
    optimizer = _sharded(module)
    for _ in range(2):
        _step(whole, reference)
        _step(module, optimizer)
    merged = _merged(_states(module, optimizer))
    for name, value in whole.state_dict().items():
        assert torch.equal(merged[0][name], value.cpu()), name
    _assert_state(merged[1]["state"], reference.state_dict()["state"])
    # Index 1 is frozen and has no state.
    assert len(merged[1]["param_groups"][0]["params"]) == 6
    assert len(merged[1]["state"]) == 5

    # Deduplicated shards, and merged ones, go on to the bit.
    deduped = deduped_state_dict(module, optimizer)
    assert deduped[0] is not None
    assert deduped[1] is not None
    assert bool([name for name in deduped[0] if name != EXTRA_STATE_KEY]) == (rank == 0)
    _assert_state(_merged(deduped)[1]["state"], merged[1]["state"])
    _step(whole, reference)
    before = copy.deepcopy(merged[1]["state"])
    for load, states in ((load_deduped_state_dict, deduped), (load_merged_state_dict, merged)):
        other = _parallel(7, torch.float32)
        loaded = _sharded(other, lr=0.5)
        assert states[0] is not None
        assert states[1] is not None
        load(other, states[0], loaded, states[1])
        _step(other, loaded)
        for name, value in whole.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    _assert_state(merged[1]["state"], before)
    # The next rank's shards are refused.
    neighbour = parallel_state.get_exchange().gather(_states(module, optimizer))[(rank + 1) % 4]
    with pytest.raises(ValueError, match="each rank loads what it has saved"):
        optimizer.load_state_dict(take_optimizer_extra_state(module, optimizer, neighbour[1]))
    with pytest.raises(ValueError, match="is a merged one: load it with load_merged_state_dict"):
        take_optimizer_extra_state(module, optimizer, merged[1])
    with pytest.raises(ValueError, match="is that of one rank: give what merge_state_dicts returned"):
        load_merged_state_dict(module, merged[0], optimizer, neighbour[1])


def _masters(rank: int) -> None:
    """Master copies of half parameters are merged and loaded beside the state."""
    module = _parallel(0, torch.bfloat16)
    optimizer = _sharded(module)
    for _ in range(2):
        _step(module, optimizer, torch.bfloat16)
    merged = _merged(_states(module, optimizer))
    assert merged[1]["state"][0]["exp_avg"].dtype is torch.float32
    masters = merged[1][EXTRA_STATE_KEY]["masters"]
    assert torch.equal(masters["first.weight"].bfloat16(), merged[0]["first.weight"])
    assert not torch.equal(masters["first.weight"], merged[0]["first.weight"].float())
    other = _parallel(7, torch.bfloat16)
    loaded = _sharded(other)
    load_merged_state_dict(other, merged[0], loaded, merged[1])
    for _ in range(2):
        _step(module, optimizer, torch.bfloat16)
        _step(other, loaded, torch.bfloat16)
    one, two = _merged(_states(module, optimizer)), _merged(_states(other, loaded))
    _assert_state({0: one[1][EXTRA_STATE_KEY]["masters"]}, {0: two[1][EXTRA_STATE_KEY]["masters"]})
    _assert_state(one[1]["state"], two[1]["state"])


def _fused(rank: int) -> None:
    """GPT-2 with its own tensor plan: parts of three blocks, a tied head, and shards of all."""
    inputs = batch()
    module = parallelize(make("gpt2"), inputs, "tp", ComputeConfig(2, 4, use_zero=True))
    assert isinstance(module, ParallelModule)
    optimizer = build_optimizer(module, torch.optim.AdamW, lr=0.01)
    module(**inputs).loss.backward()
    optimizer.step()
    merged = _merged((module.state_dict(), optimizer.state_dict()))
    whole = make("gpt2", seed=3)
    adam = torch.optim.AdamW(whole.parameters())
    whole.load_state_dict(merged[0])
    adam.load_state_dict(merged[1])
    other = parallelize(make("gpt2", seed=4), inputs, "tp", ComputeConfig(2, 4))
    assert isinstance(other, ParallelModule)
    loaded = build_optimizer(other, torch.optim.AdamW)
    load_merged_state_dict(other, whole.state_dict(), loaded, adam.state_dict())
    again = _merged((other.state_dict(), loaded.state_dict()))
    assert list(again[0]) == list(whole.state_dict())
    assert all(torch.equal(value, merged[0][name]) for name, value in again[0].items())
    _assert_state(again[1]["state"], adam.state_dict()["state"])


def test_shards_merge_and_load_in_other_plans() -> None:
    run_ranks(4, _cases)
