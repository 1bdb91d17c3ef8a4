"""``data_parallel_sampler``: the ranks of a replica get the same samples, replicas disjoint ones."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nxdpp import data_parallel_sampler, parallel_state
from tests.support.run_ranks import run_ranks


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


class Stream(IterableDataset[int]):
    """Numbers without an end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def indices(sampler: Iterable[Any]) -> list[int]:
    # A DistributedSampler declares the type of the samples for its indices.
    return list(sampler)


def epochs_of(rank: int) -> list[list[int]]:
    """The samples of this rank in the batches of three epochs, the third with the number of the first."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    # Global generators differ between ranks, and must not matter.
    torch.manual_seed(rank)
    sampler = data_parallel_sampler(numbers(21), seed=5)
    loader = DataLoader(numbers(21), batch_size=4, sampler=sampler, drop_last=True)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append([int(sample) for (batch,) in loader for sample in batch])
    return epochs


def test_ranks_of_a_replica_have_the_same_samples_and_replicas_disjoint_ones() -> None:
    by_rank = run_ranks(4, epochs_of)
    for first, other, again in by_rank:
        assert len(first) == len(other) == 8
        assert first != other
        assert again == first
    # Ranks 0 and 2 are the stages of replica 0.
    assert by_rank[0] == by_rank[2]
    assert by_rank[1] == by_rank[3]
    for mine, others in zip(by_rank[0], by_rank[1], strict=True):
        assert not set(mine) & set(others)


def replica(number: int) -> None:
    """Make this process a rank of one of two replicas."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_debug(
        data_parallel_rank=number, data_parallel_size=2, pipeline_model_parallel_rank=1, pipeline_model_parallel_size=2
    )


@pytest.mark.parametrize(
    ("drop_last", "parts"),
    [(True, [[0, 2, 4], [1, 3, 5]]), (False, [[0, 2, 4, 6], [1, 3, 5, 0]])],
)
def test_an_uneven_data_set_loses_its_last_sample_or_repeats_one(drop_last: bool, parts: list[list[int]]) -> None:
    for number, part in enumerate(parts):
        replica(number)
        assert indices(data_parallel_sampler(numbers(7), shuffle=False, drop_last=drop_last)) == part


def test_a_stream_is_divided_as_the_error_says() -> None:
    remedy = r"a \w*Stream has no samples by index.*islice\(stream, .*get_data_parallel_rank\(\).*here 1 and 2"
    replica(1)
    with pytest.raises(TypeError, match=remedy):
        data_parallel_sampler(Stream())
    own = itertools.islice(
        Stream(), parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_size()
    )
    assert list(itertools.islice(own, 3)) == [1, 3, 5]
