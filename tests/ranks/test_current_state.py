"""Getters, in the debug mode too: the numbers of a rank, no processes, and errors for functions that need them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks

ANSWERS: dict[str, Any] = {
    "get_tensor_model_parallel_size": 2,
    "get_tensor_parallel_size": 2,
    "get_tensor_model_parallel_rank": 0,
    "get_tensor_model_parallel_src_rank": 6,
    "get_data_parallel_size": 2,
    "get_data_parallel_world_size": 2,
    "get_data_parallel_rank": 1,
    "get_data_parallel_src_rank": 4,
    "get_pipeline_model_parallel_size": 3,
    "get_pipeline_model_parallel_rank": 1,
    "get_pipeline_model_parallel_first_rank": 2,
    "get_pipeline_model_parallel_last_rank": 10,
    "get_pipeline_model_parallel_next_rank": 10,
    "get_pipeline_model_parallel_prev_rank": 2,
    "is_pipeline_first_stage": False,
    "is_pipeline_last_stage": False,
    "get_context_model_parallel_size": 1,
    "get_context_model_parallel_rank": 0,
    "get_context_model_parallel_src_tgt_pairs": [],
    "get_expert_model_parallel_size": 1,
    "get_expert_model_parallel_rank": 0,
    "get_expert_data_parallel_size": 2,
    "get_expert_data_parallel_rank": 1,
}
TENSOR = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
DATA = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
PIPELINE = [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
ALONE = [[rank] for rank in range(12)]
LISTS: dict[str, list[list[int]]] = {
    "get_tensor_model_parallel": TENSOR,
    "get_data_parallel": DATA,
    "get_pipeline_model_parallel": PIPELINE,
    "get_context_model_parallel": ALONE,
    "get_expert_model_parallel": ALONE,
    "get_expert_data_parallel": DATA,
}


SIZES = ("get_tensor_model_parallel_size", "get_data_parallel_size", "get_pipeline_model_parallel_size")
RANKS = ("get_tensor_model_parallel_rank", "get_data_parallel_rank", "get_pipeline_model_parallel_rank")
GROUPS = (
    "get_tensor_model_parallel_group",
    "get_data_parallel_group",
    "get_pipeline_model_parallel_group",
)
NEED_PROCESSES = (
    *GROUPS,
    "get_pipeline_control_group",
    "get_replica_control_group",
    "get_tensor_control_group",
    "get_pipeline_transfer_groups",
    "get_device_mesh",
    "get_exchange",
)


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _answers() -> dict[str, Any]:
    numbers = {name: getattr(parallel_state, name)() for name in (*SIZES, *RANKS)}
    lists = {name: getattr(parallel_state, name)(as_list=True) for name in GROUPS}
    return {**numbers, **lists, "device": parallel_state.local_device()}


def _real_answers(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert not parallel_state.is_debug()
    answers = _answers()
    parallel_state.destroy_model_parallel()
    return answers


def test_answers_equal_those_of_each_rank_of_a_job() -> None:
    for rank, real in enumerate(run_ranks(8, _real_answers)):
        parallel_state.initialize_debug(
            pipeline_model_parallel_rank=rank // 4,
            pipeline_model_parallel_size=2,
            data_parallel_rank=rank // 2 % 2,
            data_parallel_size=2,
            tensor_model_parallel_rank=rank % 2,
            tensor_model_parallel_size=2,
        )
        with torch.device("meta"):
            assert _answers() == real
        parallel_state.destroy_model_parallel()


def test_groups_are_refused() -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=3, pipeline_model_parallel_size=16)
    for getter in NEED_PROCESSES:
        with pytest.raises(RuntimeError, match=r"debug mode.*rank 3 of 16.*torchrun.*initialize_model_parallel"):
            getattr(parallel_state, getter)()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size=0 must be an integer of at least 1"),
        (
            {"pipeline_model_parallel_rank": 4, "pipeline_model_parallel_size": 4},
            "pipeline_model_parallel_rank=4 must be an integer from 0 to 3, because pipeline_model_parallel_size is 4",
        ),
    ],
)
def test_invalid_ranks_and_sizes_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel_state.initialize_debug(**numbers)
    assert not parallel_state.is_debug()


def _start() -> None:
    numbers: dict[str, Any] = {
        "pipeline_model_parallel_rank": 1,
        "pipeline_model_parallel_size": 3,
        "data_parallel_rank": 1,
        "data_parallel_size": 2,
        "tensor_model_parallel_rank": 0,
        "tensor_model_parallel_size": 2,
    }
    parallel_state.initialize_debug(**numbers)


def test_sizes_and_ranks() -> None:
    _start()
    assert {name: getattr(parallel_state, name)() for name in ANSWERS} == ANSWERS


def test_lists_of_groups_and_replica_groups() -> None:
    _start()
    for name, groups in LISTS.items():
        assert getattr(parallel_state, f"{name}_group")(as_list=True) == groups, name
        assert getattr(parallel_state, f"{name}_replica_groups")() == groups, name
    assert parallel_state.get_tensor_parallel_replica_groups() == TENSOR
    assert parallel_state.get_world_group(as_list=True) == [list(range(12))]


def test_every_getter_before_initialisation_names_the_remedy() -> None:
    for getter in [name for name in dir(parallel_state) if name.startswith(("get_", "is_pipe"))]:
        with pytest.raises(RuntimeError, match=r"call nxdpp\.parallel_state\.initialize_model_parallel"):
            getattr(parallel_state, getter)()
