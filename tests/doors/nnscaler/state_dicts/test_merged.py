"""Merged and deduplicated state dicts: from two pipelines of two to every other plan, to the bit."""

import copy
from collections.abc import Mapping
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
from nxdpp.nnscaler import (
    ComputeConfig,
    ParallelModule,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
    merge_state_dicts,
)
from tests.doors.nnscaler.modules import Blocks, sample_of
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks

PLANS = {
    "pp2 dp2": ("pp", ComputeConfig(2, 4, use_end2end=True, pas_config={"pipeline_nmicros": 2})),
    "pp2 tp2": (
        "hybrid",
        ComputeConfig(4, 4, use_end2end=True, pas_config={"pipeline_nmicros": 2, "pipeline_nstages": 2}),
    ),
    "tp2 dp2": ("tp", ComputeConfig(2, 4, use_end2end=True)),
}


class Tied(Blocks):
    """Blocks whose head has the weight of the embedding, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def _whole(seed: int, kind: type[Blocks]) -> Blocks:
    torch.manual_seed(seed)
    return kind()


def _parallel(plan: str, seed: int, kind: type[Blocks], **options: Any) -> tuple[ParallelModule, torch.optim.Adam]:
    policy, config = PLANS[plan]
    whole = _whole(seed, kind)
    module = parallelize(whole, sample_of(whole), policy, config, **options)
    assert isinstance(module, ParallelModule)
    return module, torch.optim.Adam(module.parameters(), lr=0.01)


def _samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(16).view(2, 2, 4)
    return [{"tokens": each, "labels": each + 1} for each in tokens]


def _steps(count: int, whole: Blocks, optimizer: torch.optim.Optimizer) -> None:
    """Steps of one process, with the sum of the losses of two samples."""
    for _ in range(count):
        optimizer.zero_grad()
        for sample in _samples():
            whole(sample)[0].backward()
        optimizer.step()


def _parallel_steps(count: int, module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    """The same steps in each unit."""
    for _ in range(count):
        module.train_step(_samples())
        optimizer.step()


def _all_of(value: Any) -> list[Any]:
    gathered: list[Any] = parallel_state.get_exchange().gather(value)
    return gathered


def _states(module: nn.Module, optimizer: torch.optim.Adam) -> Any:
    state = optimizer.state_dict()
    if EXTRA_STATE_KEY not in state:
        state = add_optimizer_extra_state(module, optimizer, state)
    return module.state_dict(), state


def _deduped(module: nn.Module, optimizer: torch.optim.Adam) -> tuple[dict[str, Any], dict[str, Any]]:
    module_state, state = deduped_state_dict(module, optimizer)
    assert module_state is not None
    assert state is not None
    return module_state, state


def _merged(states: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    module, optimizer = merge_state_dicts([each[0] for each in states], [each[1] for each in states])
    assert optimizer is not None
    return module, optimizer


def _assert_equal(one: Mapping[str, Any], other: Mapping[str, Any], place: str, error: float = 0.0) -> None:
    """Verify nested state, to the bit where no relative ``error`` is given."""
    assert list(one) == list(other), place
    for key, value in one.items():
        if isinstance(value, dict):
            _assert_equal(value, other[key], f"{place}.{key}", error)
        elif isinstance(value, torch.Tensor):
            assert value.dtype is other[key].dtype, f"{place}.{key}"
            torch.testing.assert_close(value.cpu(), other[key].cpu(), rtol=error, atol=error, msg=f"{place}.{key}")


def _cases(rank: int, kind: type[Blocks], others: list[str]) -> None:
    """Train in pp2 dp2, merge in all ways, load in ``others``, train there, and merge again."""
    whole = _whole(3, kind)
    reference = torch.optim.Adam(whole.parameters(), lr=0.01)
    _steps(2, whole, reference)
    module, optimizer = _parallel("pp2 dp2", 3, kind)
    _parallel_steps(2, module, optimizer)

    # Merge of all states, of the deduplicated ones, and in another order.
    everyones = _all_of(_states(module, optimizer))
    merged, merged_optimizer = _merged(everyones)
    # The gradient of a tied weight is summed in another order.
    error = 0.0 if kind is Blocks else 1e-5
    _assert_equal(merged, whole.state_dict(), "merged", error)
    assert list(merged_optimizer) == list(reference.state_dict())
    _assert_equal(merged_optimizer["state"], reference.state_dict()["state"], "merged state", error)
    deduped = _deduped(module, optimizer)
    all_deduped = _all_of(deduped)
    again, optimizer_again = _merged(all_deduped[::-1])
    _assert_equal(again, merged, "deduped")
    _assert_equal(optimizer_again, merged_optimizer, "deduped state")
    tensors = [name for name, value in deduped[0].items() if isinstance(value, torch.Tensor)]
    assert bool(tensors) == (rank < 2)
    assert bool(deduped[1]["state"]) == (rank < 2)

    # The original module and torch's Adam go on.
    fresh = _whole(9, kind)
    adam = torch.optim.Adam(fresh.parameters(), lr=0.5)
    fresh.load_state_dict(merged)
    adam.load_state_dict(copy.deepcopy(merged_optimizer))
    _steps(1, fresh, adam)
    _steps(1, whole, reference)
    _assert_equal(fresh.state_dict(), whole.state_dict(), "original", error)

    # A rank loads what it has deduplicated.
    other, loaded = _parallel("pp2 dp2", 9, kind)
    load_deduped_state_dict(other, deduped[0], loaded, deduped[1])
    _parallel_steps(1, other, loaded)
    _assert_equal(_merged(_all_of(_states(other, loaded)))[0], whole.state_dict(), "after deduped", error)
    if rank == 2:
        with pytest.raises(ValueError, match=r"is that of rank 3 with .* and this is rank 2"):
            other.load_state_dict(everyones[3][0])
    with pytest.raises(ValueError, match=r"is that of rank|on rank"):
        load_deduped_state_dict(other, all_deduped[(rank + 1) % 4][0])

    # Every other plan goes on too.
    for plan in others:
        parallel_state.destroy_model_parallel()
        _other_plan(rank, plan, kind, (merged, merged_optimizer), (whole, reference))


def _other_plan(rank: int, plan: str, kind: type[Blocks], merged: Any, expected: Any) -> None:
    module, optimizer = _parallel(plan, 9, kind, init_module_params=False)
    with pytest.raises(RuntimeError, match="have no values"):
        module.train_step([])
    broken = dict(merged[0])
    broken.pop("head.bias")
    with pytest.raises(ValueError, match=r"lacks \['head.bias'\] of 1"):
        load_merged_state_dict(module, broken)
    with pytest.raises(ValueError, match="given together"):
        load_merged_state_dict(module, merged[0], optimizer)
    before = copy.deepcopy(merged)
    load_merged_state_dict(module, merged[0], optimizer, merged[1])
    round_trip = _merged(_all_of(_states(module, optimizer)))
    _assert_equal(round_trip[0], merged[0], f"{plan} module")
    _assert_equal(round_trip[1]["state"], merged[1]["state"], f"{plan} state")
    _parallel_steps(1, module, optimizer)
    trained = _merged(_all_of(_states(module, optimizer)))[0]
    for name, value in expected[0].state_dict().items():
        torch.testing.assert_close(trained[name], value.cpu(), rtol=1e-5, atol=1e-6)
    states = _deduped(module, optimizer)
    load_deduped_state_dict(module, states[0], optimizer, states[1])
    _assert_equal(_merged(_all_of(states))[0], trained, f"{plan} from deduplicated")
    # Training leaves the merged dicts as they are.
    _assert_equal(merged[1]["state"], before[1]["state"], "merged dicts")
    if plan == "tp2 dp2":
        with pytest.raises(ValueError, match="is a merged one: load it with load_merged_state_dict"):
            take_optimizer_extra_state(module, optimizer, merged[1])


def _plain(rank: int) -> None:
    _cases(rank, Blocks, ["tp2 dp2", "pp2 tp2"])
    parallel_state.destroy_model_parallel()
    _cases(rank, Tied, [])


def test_states_of_all_ranks_merge_and_load_in_every_plan() -> None:
    run_ranks(4, _plain)
