"""Getters of NeuronX Distributed's scripts in the debug mode, which needs no processes."""

from collections.abc import Iterator
from typing import Any

import pytest

from nxdpp.ranks import parallel_state

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


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _start() -> None:
    numbers = {
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
