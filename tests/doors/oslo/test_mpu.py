"""The nine methods of ``MPU``, at OSLO's import path, and through a model."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import nxdpp.oslo as oslo
from nxdpp import parallel_state
from nxdpp.oslo.pytorch.model_parallelism.network.mpu import MPU
from tests.support.run_ranks import run_ranks

LAYOUTS = ((2, 1), (1, 2), (2, 2))


def _numbers(mpu: MPU) -> tuple[list[list[int]], list[int], list[int]]:
    """Ranks of the groups, own ranks and sizes of data, tensor and pipeline parallelism."""
    kinds = ("data", "tensor", "pipeline")
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
        # The same sizes again are the same groups.
        assert _numbers(MPU(tensor, pipeline)) == found[-1]
        with pytest.raises(RuntimeError, match="already initialized"):
            MPU(tensor_parallel_size=3 - min(tensor, 2), pipeline_parallel_size=pipeline)
        parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="4"):
        MPU(tensor_parallel_size=3, pipeline_parallel_size=1)
    return found


@pytest.mark.one_python
def test_groups_ranks_and_sizes() -> None:
    results = run_ranks(4, _in_all_layouts)
    for (tensor, pipeline), *of_ranks in zip(LAYOUTS, *results, strict=True):
        data = 4 // (tensor * pipeline)
        # The pipeline is outermost, and tensor-parallel ranks are neighbours.
        places = list(product(range(pipeline), range(data), range(tensor)))
        for rank, (groups, ranks, sizes) in enumerate(of_ranks):
            p, d, t = places[rank]
            assert sizes == [data, tensor, pipeline]
            assert ranks == [d, t, p]
            assert groups == [
                [places.index((p, each, t)) for each in range(data)],
                [places.index((p, d, each)) for each in range(tensor)],
                [places.index((each, d, t)) for each in range(pipeline)],
            ]


@pytest.fixture
def model() -> Iterator[GPT2LMHeadModel]:
    yield GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    parallel_state.destroy_model_parallel()


def test_a_model_of_one_process_has_it(model: GPT2LMHeadModel) -> None:
    parallel = oslo.initialize(model, {"model_parallelism": {"enable": True}})

    assert parallel is model
    assert isinstance(parallel, GPT2LMHeadModel)
    assert type(parallel).__name__ == "GPT2LMHeadModel"
    assert isinstance(parallel.mpu, MPU)
    assert _numbers(parallel.mpu) == ([[0], [0], [0]], [0, 0, 0], [1, 1, 1])
    with pytest.raises(RuntimeError, match="was given to initialize before"):
        oslo.initialize(parallel, {"model_parallelism": {"enable": True}})


def test_other_models_are_refused() -> None:
    with torch.device("meta"):
        without = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    with pytest.raises(ValueError, match="on the meta device: build it on the CPU"):
        oslo.initialize(without, {"model_parallelism": {"enable": True}})
    with pytest.raises(TypeError, match=r"takes a PreTrainedModel of transformers, not a Linear\."):
        oslo.initialize(torch.nn.Linear(1, 1), {"model_parallelism": {"enable": True}})  # type: ignore[type-var]
