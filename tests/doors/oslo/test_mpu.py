"""The methods of ``MPU``, at OSLO's import path, and through a model."""

import os
from collections.abc import Iterator
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import nxdpp.oslo as oslo
from nxdpp import parallel_state
from nxdpp.oslo.pytorch.model_parallelism.network.mpu import MPU
from tests.support.run_ranks import run_ranks

LAYOUTS = ((2, 1), (2, 2))


def _numbers(mpu: MPU) -> tuple[list[list[int]], list[int], list[int]]:
    """Ranks of the groups, own ranks and sizes of data, tensor, pipeline and model parallelism."""
    kinds = ("data", "tensor", "pipeline", "model")
    groups = [getattr(mpu, f"get_{kind}_parallel_group")() for kind in kinds]
    ranks = [getattr(mpu, f"get_{kind}_parallel_rank")() for kind in kinds]
    sizes = [getattr(mpu, f"get_{kind}_parallel_world_size")() for kind in kinds]
    assert [dist.get_rank(group) for group in groups] == ranks
    assert [dist.get_world_size(group) for group in groups] == sizes
    # Each group works, for DistributedDataParallel.
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return [dist.get_process_group_ranks(group) for group in groups], ranks, sizes


def _in_all_layouts(rank: int) -> list[tuple[list[list[int]], list[int], list[int]]]:
    found = []
    for tensor, pipeline in LAYOUTS:
        found.append(_numbers(MPU(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)))
        _check_stages(rank, found[-1])
        # The same sizes again are the same groups.
        assert _numbers(MPU(tensor, pipeline)) == found[-1]
        with pytest.raises(RuntimeError, match="already initialized"):
            MPU(tensor_parallel_size=3 - min(tensor, 2), pipeline_parallel_size=pipeline)
        parallel_state.destroy_model_parallel()
    _check_worlds_that_do_not_divide()
    return found


def _check_stages(rank: int, numbers: tuple[list[list[int]], list[int], list[int]]) -> None:
    (_, tensor, own, _), (_, _, stage, _), (_, _, stages, _) = numbers
    mpu = MPU(len(tensor), stages)
    assert mpu.get_tensor_parallel_src_rank() == tensor[0]
    assert mpu.is_pipeline_first_stage() == (stage == 0)
    assert mpu.is_pipeline_last_stage() == (stage == stages - 1)
    assert mpu.get_pipeline_model_parallel_global_ranks_per_group() == own
    all_ranks = mpu.get_pipeline_parallel_global_ranks_across_all_groups()
    assert own in all_ranks
    assert sorted(chain(*all_ranks)) == list(range(4))
    assert mpu.model_parallel_is_initialized()
    here = mpu.get_tensor_parallel_rank(), mpu.get_pipeline_parallel_rank(), mpu.get_data_parallel_rank()
    assert mpu.rank2device(*here) == rank
    with pytest.raises(ValueError, match="not in list"):
        mpu.rank2device(-1, 0, 0)


def _check_worlds_that_do_not_divide() -> None:
    """All ranks are refused before anything is started, for fewer ranks than all and for more."""
    for size in (3, 8):
        message = f"a world of 4 ranks does not .* start a multiple of {size} processes"
        with pytest.raises(ValueError, match=message):
            MPU(tensor_parallel_size=size, pipeline_parallel_size=1, master_addr="127.0.0.9")
        assert os.environ["MASTER_ADDR"] != "127.0.0.9"
        with pytest.raises(ValueError, match=message):
            oslo.initialize(_gpt2(), {"model_parallelism": {"enable": True, "tensor_parallel_size": size}})
    assert not dist.is_initialized()


def test_groups_ranks_and_sizes() -> None:
    results = run_ranks(4, _in_all_layouts)
    for (tensor, pipeline), *of_ranks in zip(LAYOUTS, *results, strict=True):
        data = 4 // (tensor * pipeline)
        # The pipeline is outermost, and tensor-parallel ranks are neighbours.
        places = list(product(range(pipeline), range(data), range(tensor)))
        for rank, (groups, ranks, sizes) in enumerate(of_ranks):
            p, d, t = places[rank]
            assert sizes == [data, tensor, pipeline, tensor * pipeline]
            assert ranks == [d, t, p, p * tensor + t]
            assert groups == [
                [places.index((p, each, t)) for each in range(data)],
                [places.index((p, d, each)) for each in range(tensor)],
                [places.index((each, d, t)) for each in range(pipeline)],
                [places.index((each, d, other)) for each in range(pipeline) for other in range(tensor)],
            ]


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))


@pytest.fixture
def model() -> Iterator[GPT2LMHeadModel]:
    yield _gpt2()
    parallel_state.destroy_model_parallel()


def test_a_model_of_one_process_has_it(model: GPT2LMHeadModel) -> None:
    parallel = oslo.initialize(model, {"model_parallelism": {"enable": True}})

    assert parallel is model
    assert isinstance(parallel, GPT2LMHeadModel)
    assert type(parallel).__name__ == "GPT2LMHeadModel"
    assert isinstance(parallel.mpu, MPU)
    assert _numbers(parallel.mpu) == ([[0]] * 4, [0] * 4, [1] * 4)
    with pytest.raises(RuntimeError, match="was given to initialize before"):
        oslo.initialize(parallel, {"model_parallelism": {"enable": True}})
