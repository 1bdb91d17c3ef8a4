"""``ComputeConfig``: frozen, and verified at construction."""

import dataclasses
from typing import Any

import pytest

from nxdpp.nnscaler import ComputeConfig

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
    ({"plan_ngpus": 3, "runtime_ngpus": 4}, "runtime_ngpus=4 must be a multiple of plan_ngpus=3"),
    ({"use_zero": True, "zero_ngroups": 3}, "zero_ngroups=3 must divide the 4 units"),
    ({"use_zero": 3}, "use_zero must be True or False, not 3: nxdpp.fully_shard shards parameters, of an NxDPPModel"),
]


def config(**given: Any) -> ComputeConfig:
    return ComputeConfig(**{"plan_ngpus": 1, "runtime_ngpus": 4, **given})


def test_fields_have_the_order_and_the_defaults_of_nnscaler() -> None:
    made = config()

    assert list(dataclasses.asdict(made)) == ["plan_ngpus", "runtime_ngpus", *DEFAULTS]
    assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
    assert ComputeConfig(2, 4) == ComputeConfig(plan_ngpus=2, runtime_ngpus=4)


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_numbers_that_cannot_be_used_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        config(**given)


def test_runtime_ngpus_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert ComputeConfig(3).runtime_ngpus == 6

    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="runtime_ngpus is not given and WORLD_SIZE is not set: give it, or start"):
        ComputeConfig(3)
    assert ComputeConfig(3, runtime_ngpus=3).runtime_ngpus == 3
