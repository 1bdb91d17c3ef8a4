"""``ComputeConfig``: frozen, and verified at construction."""

import dataclasses
import logging
from typing import Any

import pytest

from nxdpp.nnscaler import BroadcastGenFilesStrategy, ComputeConfig, ReuseType

DEFAULTS = {
    "constant_folding": False,
    "trace_strategy": "cuda_run_cpu_offload",
    "use_zero": False,
    "zero_ngroups": 1,
    "zero_use_reduce_scatter": False,
    "inference_only": False,
    "use_end2end": False,
    "use_async_reducer": False,
    "reducer_bucket_cap_mb": None,
    "pas_config": {},
    "user_config": {},
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"plan_ngpus": 0}, "plan_ngpus must be above 0, not 0"),
    ({"plan_ngpus": -2}, "plan_ngpus must be above 0, not -2"),
    ({"runtime_ngpus": 0}, "runtime_ngpus must be above 0, not 0"),
    ({"plan_ngpus": 3, "runtime_ngpus": 4}, "runtime_ngpus=4 must be a multiple of plan_ngpus=3"),
    ({"use_zero": True, "zero_ngroups": 0}, "zero_ngroups must be above 0, not 0"),
    (
        {"use_zero": True, "zero_use_reduce_scatter": True, "zero_ngroups": 2},
        "zero_use_reduce_scatter=True needs zero_ngroups=1, not 2",
    ),
    ({"reducer_bucket_cap_mb": -1.0}, "reducer_bucket_cap_mb must not be negative: -1.0"),
    ({"trace_strategy": "cpux"}, "trace_strategy must be one of cpu, cuda, meta, cuda_run_cpu_offload, reuse_cache"),
    ({"use_zero": True, "zero_ngroups": 3}, "zero_ngroups=3 must divide the 4 units"),
]

WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"plan_ngpus": 1.0}, "plan_ngpus must be a whole number, not 1.0"),
    ({"plan_ngpus": True}, "plan_ngpus must be a whole number, not True"),
    ({"use_zero": 3}, "use_zero must be True or False, not 3: nxdpp.fully_shard shards parameters, of an NxDPPModel"),
    ({"use_end2end": 1}, "use_end2end must be True or False, not 1"),
    ({"reducer_bucket_cap_mb": "5"}, "reducer_bucket_cap_mb must be a number of megabytes or None, not '5'"),
    ({"pas_config": [1]}, r"pas_config must be a dict, not \[1\]"),
    ({"user_config": None}, "user_config must be a dict, not None"),
]


def config(**given: Any) -> ComputeConfig:
    return ComputeConfig(**{"plan_ngpus": 1, "runtime_ngpus": 4, **given})


def test_fields_have_the_order_and_the_defaults_of_nnscaler() -> None:
    made = config()

    assert list(dataclasses.asdict(made)) == ["plan_ngpus", "runtime_ngpus", *DEFAULTS]
    assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
    assert ComputeConfig(2, 4) == ComputeConfig(plan_ngpus=2, runtime_ngpus=4)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().use_zero = True  # type: ignore[misc]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_numbers_that_cannot_be_used_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        config(**given)


@pytest.mark.parametrize(("given", "message"), WRONG_TYPES)
def test_values_of_another_type_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        config(**given)


def test_runtime_ngpus_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert ComputeConfig(3).runtime_ngpus == 6

    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="runtime_ngpus is not given and WORLD_SIZE is not set: give it, or start"):
        ComputeConfig(3)
    assert ComputeConfig(3, runtime_ngpus=3).runtime_ngpus == 3


def test_groups_without_zero_are_one_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = config(zero_ngroups=2)

    assert made.zero_ngroups == 1
    assert "zero_ngroups=2 has no effect without use_zero" in caplog.text


def test_sizes_of_groups() -> None:
    plain, zero = config(plan_ngpus=2), config(plan_ngpus=2, use_zero=True)

    assert plain.gpu_config == {"plan_ngpus": 2, "runtime_ngpus": 4}
    assert (plain.module_dedup_group_size, plain.optimizer_dedup_group_size) == (2, 2)
    assert (zero.module_dedup_group_size, zero.optimizer_dedup_group_size) == (2, 4)
    assert config(use_zero=True, zero_ngroups=2).optimizer_dedup_group_size == 2
    assert config(user_config={"a": 1}).graph_config == {
        "constant_folding": False,
        "user_config": {"a": 1},
        "inference_only": False,
        "end2end_mode": False,
        "trace_strategy": "cuda_run_cpu_offload",
    }


def test_choices_are_taken_as_text() -> None:
    assert [choice.value for choice in ReuseType] == ["match", "override", "moo", "graph"]
    assert [choice.value for choice in BroadcastGenFilesStrategy] == ["none", "all", "no_weights", "code"]
    assert ReuseType("moo") is ReuseType.MOO
    with pytest.raises(ValueError, match="ReuseType has no 'always': give one of 'match', 'override', 'moo', 'graph'"):
        ReuseType("always")
