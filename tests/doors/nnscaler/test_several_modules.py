"""Modules with different settings of ZeRO in one optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler import (
    ComputeConfig,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    merge_state_dicts,
)
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Net, sample
from tests.support.run_ranks import run_ranks

RANKS, STEPS = 4, 2


class Two(nn.Module):
    """Two modules, parallel or not, between plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.first, self.second = Net(), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.between(self.first(self.before(x)).tanh()))
        return self.after(x.tanh()).square().mean()  # type: ignore[no-any-return]


def two(seed: int, *configs: ComputeConfig) -> Any:
    torch.manual_seed(seed)
    model: Any = Two()
    policy = "tp" if configs and configs[0].plan_ngpus > 1 else "dp"
    for name, config in zip(("first", "second"), configs, strict=False):
        inner = model.get_submodule(name)
        setattr(model, name, parallelize(inner, {"x": sample(0)["data"]}, policy, config, instance_name=name))
    return model


def mixed_zero(rank: int, plan: int, *settings: dict[str, Any], groups: int) -> None:
    """Train as one process does, and go on from deduplicated and merged states."""
    configs = [ComputeConfig(plan, RANKS, **each) for each in settings]
    model, expected = two(0, *configs), two(0)
    ours: Any = build_optimizer(model, torch.optim.Adam, lr=0.05)
    sharding = ours._sharding
    assert sharding.groups == groups
    theirs = torch.optim.Adam(expected.parameters(), lr=0.05)
    for step in range(STEPS):
        model(sample(10 * step + rank // plan)["data"]).backward()
        for unit in range(RANKS // plan):
            expected(sample(10 * step + unit)["data"]).backward()
        torch.testing.assert_close(ours.clip_gnorm(0.5), nn.utils.clip_grad_norm_(expected.parameters(), 0.5))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for name in ("before.weight", "between.bias", "after.weight"):
        torch.testing.assert_close(model.get_parameter(name), expected.get_parameter(name), rtol=1e-5, atol=1e-6)
    kept: Any = deduped_state_dict(model, ours)
    other = two(3, *configs)
    again: Any = build_optimizer(other, torch.optim.Adam, lr=0.1)
    load_deduped_state_dict(other, kept[0], again, kept[1])
    assert str(again.state_dict()) == str(ours.state_dict())
    everyones = parallel_state.get_exchange().gather(kept)
    merged, state = merge_state_dicts([each[0] for each in everyones], [each[1] for each in everyones])
    # Merged values are in host memory.
    apart: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6, "check_device": False}
    torch.testing.assert_close(merged, expected.state_dict(), **apart)
    assert state is not None
    torch.testing.assert_close(state["state"], theirs.state_dict()["state"], **apart)
    if groups > 1:
        # Without zero_grad a backward would add to the sums.
        model(sample(0)["data"]).backward()
        ours.sync_shard_grad()
        with pytest.raises(RuntimeError, match="a backward adds to the gradient"):
            model(sample(0)["data"]).backward()
    parallel_state.destroy_model_parallel()


def run_cases(rank: int) -> None:
    zero: dict[str, Any] = {"use_zero": True}
    mixed_zero(rank, 1, {**zero, "zero_ngroups": 2}, {**zero, "zero_ngroups": 4}, groups=2)
    mixed_zero(rank, 2, {}, {**zero, "zero_use_reduce_scatter": True}, groups=1)


def test_sums_and_states_are_those_of_one_process() -> None:
    run_ranks(RANKS, run_cases)
