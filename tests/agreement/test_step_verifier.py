"""Ranks of a pipeline that are about to run different steps raise an error, and do not wait for each other."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement.fingerprint import fingerprint
from nxdpp.agreement.step_signature import StepSignature
from nxdpp.agreement.step_verifier import StepIdentity, StepVerifier
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks

GRAPH, OTHER_GRAPH = fingerprint(["first", "second"]), fingerprint(["first", "third"])
A = StepSignature((("a", (2, 3), torch.int64),), (False, torch.bfloat16), True)
B = StepSignature((("b", (2, 3), torch.int64),), (True, torch.bfloat16), False)


def compare(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    verifier = StepVerifier(parallel_state.get_pipeline_control_group())
    steps = [
        (StepIdentity(GRAPH, A), StepIdentity(GRAPH, A), True, True),
        (StepIdentity(GRAPH, A), StepIdentity(GRAPH, A), False, False),
        (StepIdentity(GRAPH, B), StepIdentity(GRAPH, A), True, False),
        (StepIdentity(GRAPH, B), StepIdentity(OTHER_GRAPH, B), False, True),
        (StepIdentity(GRAPH, B), StepIdentity(GRAPH, B), True, False),
        (StepIdentity(GRAPH, B), StepIdentity(GRAPH, B), False, True),
    ]
    messages = []
    for first, second, new_to_first, new_to_second in steps:
        step, is_new = (second, new_to_second) if rank else (first, new_to_first)
        try:
            verifier.check(step, step.digest, is_new)
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    dist.barrier()
    return messages


def test_the_later_rank_shows_the_difference() -> None:
    first, second = run_ranks(2, compare)
    assert first == [""] * 6
    assert second[:2] == ["", ""]
    assert "pipeline rank 1 (rank 1) was given other inputs than pipeline rank 0 (rank 0)" in second[2]
    for theirs, ours in (("run_eval", "run_train"), ("autocast to torch.bfloat16", "no autocast")):
        assert f"pipeline rank 0 (rank 0): {theirs}\n  pipeline rank 1 (rank 1): {ours}\n" in second[2]
    assert "pipeline rank 0 (rank 0): b (2, 3) torch.int64\n  pipeline rank 1 (rank 1): no b\n" in second[2]
    assert "pipeline rank 1 (rank 1) has other settings than pipeline rank 0 (rank 0)" in second[3]
    assert "pipeline rank 0 (rank 0): second\n  pipeline rank 1 (rank 1): third\n" in second[3]
    assert "rank 0 (rank 0) has been refreshed, moved or loaded, and pipeline rank 1 (rank 1) has not" in second[4]
    assert "rank 1 (rank 1) has been refreshed, moved or loaded, and pipeline rank 0 (rank 0) has not" in second[5]


def compare_origins(rank: int, origins: list[str | None]) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    verifier = StepVerifier(parallel_state.get_pipeline_control_group())
    step = StepIdentity(GRAPH, A, origins[rank])
    try:
        verifier.check(step, step.digest, True)
        message = ""
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    return message


def test_origins_are_compared_across_ranks_without_random_numbers() -> None:
    assert run_ranks(3, compare_origins, ["seed 1", None, "seed 1"]) == ["", "", ""]
    *_, last = run_ranks(3, compare_origins, ["seed 1", None, "seed 2"])
    assert "pipeline rank 1 (rank 1): seed 1\n  pipeline rank 2 (rank 2): seed 2\n" in last


def without_mask(rank: int, wrapped: NxDPPModel) -> None:
    batch = padded_batch(4)
    if rank == 1:
        del batch["attention_mask"]
    wrapped.run_train(**batch)


def a_length_that_rank_1_knows(rank: int, wrapped: NxDPPModel) -> None:
    wrapped.run_train(**padded_batch(4, 12 if rank == 0 else 10))


def evaluation(rank: int, wrapped: NxDPPModel) -> None:
    (wrapped.run_train if rank == 0 else wrapped.run_eval)(**padded_batch(4))


def load_on_one(rank: int, wrapped: NxDPPModel) -> None:
    if rank == 0:
        wrapped.load_local_state_dict(wrapped.local_state_dict())
        wrapped.load_state_dict(wrapped.state_dict())
    wrapped.run_train(**padded_batch(4))


MISTAKES: dict[Callable[[int, NxDPPModel], None], tuple[str, ...]] = {
    without_mask: ("was given other inputs than", "attention_mask (2, 10) torch.int64\n", "): no attention_mask\n"),
    a_length_that_rank_1_knows: ("input_ids (2, 10) torch.int64", "input_ids (2, 12) torch.int64"),
    evaluation: ("was given other inputs than", "(rank 0): run_train\n", "(rank 1): run_eval\n"),
    load_on_one: ("Call refresh() on every rank",),
}


def err(rank: int, mistake: Callable[[int, NxDPPModel], None]) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(make("llama"), num_microbatches=2)
    wrapped.run_train(**padded_batch(4))
    mistake(rank, wrapped)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_within_seconds(mistake: Callable[[int, NxDPPModel], None]) -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, err, mistake, timeout=30)
    for words in MISTAKES[mistake]:
        assert words in str(raised.value)
    assert "timeout" not in str(raised.value).splitlines()[0]


def construct_differently(rank: int, changes: list[dict[str, Any]], arguments: list[dict[str, Any]]) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    model = make("llama", layers=6, **changes[rank])
    wrapped = NxDPPModel(model, **{"num_microbatches": 2, **arguments[rank]})
    wrapped.run_train(**padded_batch(4))


def cut(*layers: int) -> dict[str, Any]:
    return {"pipeline_cuts": [f"model.layers.{layer}" for layer in layers]}


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ([{}, {"rms_norm_eps": 1e-3}, {}], [{}, {"num_microbatches": 4}, {}], "num_microbatches: 4"),
        ([{}, {}, {}], [cut(1, 2), cut(1, 2), cut(1, 3)], "pipeline_cuts: ['model.layers.1', 'model.layers.3']"),
    ],
)
def test_different_models_are_refused(changes: Any, arguments: Any, words: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(3, construct_differently, changes, arguments, timeout=30)
    assert re.search(r"has (other settings|another configuration) than pipeline rank", str(raised.value))
    assert words in str(raised.value)
