"""Groups of every rank follow from the order of the mesh; a refused call changes nothing."""

import pytest
import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.schedules.lowering.transport_rules import GLOO
from tests.support.run_ranks import run_ranks


def _sizes(rank: int, tensor: int, pipeline: int) -> tuple[int, int, int]:
    parallel_state.initialize_model_parallel(tensor, pipeline)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    assert parallel_state.get_pipeline_control_group() is pipeline_group
    assert parallel_state.get_replica_control_group() is parallel_state.get_data_parallel_group()
    transfers = parallel_state.get_pipeline_transfer_groups()
    assert transfers.rules == GLOO
    assert transfers.all == [pipeline_group]
    assert transfers.between(0, 1) == (pipeline_group, 0, 1)
    assert parallel_state.local_device() == torch.device("cpu")
    sizes = (
        parallel_state.get_tensor_model_parallel_size(),
        parallel_state.get_data_parallel_size(),
        parallel_state.get_pipeline_model_parallel_size(),
    )
    parallel_state.destroy_model_parallel()
    assert not dist.is_initialized()
    return sizes


@pytest.mark.cpu_only("it is about gloo, which is given by name")
@pytest.mark.parametrize(("world_size", "tensor", "pipeline", "data"), [(4, 1, 2, 2), (2, 2, 1, 1)])
def test_data_parallel_size_follows_from_the_others(world_size: int, tensor: int, pipeline: int, data: int) -> None:
    assert run_ranks(world_size, _sizes, tensor, pipeline) == [(tensor, data, pipeline)] * world_size


SIZES_THAT_DO_NOT_FIT = {
    (1, 2): ("3 ranks", "size 1", "size 2", "torchrun --nproc-per-node 2"),
    (2, 2): ("3 ranks", "replicas of 4"),
    (0, 1): ("tensor_model_parallel_size=0", "at least 1"),
    (1, -1): ("pipeline_model_parallel_size=-1", "at least 1"),
}


def _refused(rank: int) -> None:
    for sizes, words in SIZES_THAT_DO_NOT_FIT.items():
        with pytest.raises(ValueError, match=r".") as caught:
            parallel_state.initialize_model_parallel(*sizes)
        assert all(word in str(caught.value) for word in words), caught.value
        assert not dist.is_initialized()


def test_sizes_that_do_not_fit_are_refused_before_anything_starts() -> None:
    run_ranks(3, _refused)


def _initialize_three_times(rank: int) -> list[int]:
    sizes = []
    for pipeline in (2, 1, 2):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
        sizes.append(parallel_state.get_pipeline_model_parallel_size())
        mesh = parallel_state.get_device_mesh()
        parallel_state.initialize_model_parallel(1, pipeline)
        assert parallel_state.get_device_mesh() is mesh
        with pytest.raises(
            RuntimeError, match=f"pipeline size {pipeline}, which differs from tensor size 2 and pipeline size 1"
        ):
            parallel_state.initialize_model_parallel(2, 1)
        parallel_state.destroy_model_parallel()
        assert not parallel_state.model_parallel_is_initialized()
    return sizes


def test_a_second_call_must_have_the_same_sizes_and_after_destroy_others_are_taken() -> None:
    assert run_ranks(2, _initialize_three_times) == [[2, 1, 2], [2, 1, 2]]


def _in_a_world_of_the_users(rank: int) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    assert parallel_state.get_data_parallel_size() == 2
    parallel_state.destroy_model_parallel()
    assert dist.is_initialized()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 4
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    assert parallel_state.get_pipeline_model_parallel_rank() == rank
    dist.destroy_process_group()
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_state.get_data_parallel_size()


@pytest.mark.cpu_only("it is about gloo, which is given by name")
def test_a_world_started_by_the_user_is_not_destroyed() -> None:
    run_ranks(4, _in_a_world_of_the_users)
