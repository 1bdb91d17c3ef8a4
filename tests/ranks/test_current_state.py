"""Debug mode: the numbers of a rank, no processes, and errors for functions that need them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks

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
    "get_data_parallel_control_group",
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
