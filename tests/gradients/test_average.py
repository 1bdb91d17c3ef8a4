"""The average in buckets of any size equals the average by hand; missing gradients do not block it."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp.gradients import buckets
from nxdpp.gradients.average import average_gradients, bucket_allreduce_gradients
from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks

SHAPES = ((7,), (3, 5), (), (40, 10), (1,), (0, 4), (16, 2, 2))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _gradient(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    shape, dtype = SHAPES[index % len(SHAPES)], DTYPES[index % len(DTYPES)]
    return torch.randn(shape, generator=generator).to(dtype)


def _parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros_like(_gradient(0, index))) for index in range(count)]


def _average_over_replicas(parameters: Iterable[nn.Parameter]) -> None:
    control = parallel_state.get_replica_control_group()
    average_gradients(parameters, parallel_state.get_data_parallel_group(), control)


def _average(rank: int, bucket_bytes: int) -> tuple[list[torch.Tensor | None], int]:
    """The averaged gradients and the number of all-reduces; those in ``MISSING[rank]`` were None before."""
    parameters = _parameters(14)
    for index, parameter in enumerate(parameters):
        if index not in MISSING[rank]:
            parameter.grad = _gradient(rank, index)
    limit = mock.patch.object(buckets, "BUCKET_BYTES", bucket_bytes)
    with limit, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        _average_over_replicas(parameters)
    return [parameter.grad for parameter in parameters], all_reduce.call_count


def _by_hand(world_size: int, index: int) -> torch.Tensor:
    present = [_gradient(rank, index) for rank in range(world_size) if index not in MISSING[rank]]
    return torch.stack(present).double().sum(0) / world_size


def _compare(results: list[Any]) -> None:
    everywhere = set.intersection(*map(set, MISSING.values()))
    for averaged, _ in results:
        for index, gradient in enumerate(averaged):
            if index in everywhere:
                assert gradient is None
                continue
            assert gradient.dtype == DTYPES[index % len(DTYPES)]
            tolerance = 2e-2 if gradient.dtype == torch.bfloat16 else 1e-6
            expected = _by_hand(len(results), index)
            torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


MISSING = {0: [0, 3, 9], 1: [3, 4, 9, 13], 2: list(range(14))}


def _averages(rank: int) -> list[tuple[list[torch.Tensor | None], int]]:
    parallel_state.initialize_model_parallel()
    return [_average(rank, bucket) for bucket in (1, 2**20)]


def test_the_mean_of_several_dtypes_in_few_and_many_buckets() -> None:
    """A missing gradient counts as zeros, and stays None only if it is missing everywhere."""
    many, few = zip(*run_ranks(3, _averages), strict=True)
    for results in (many, few):
        _compare([*results])
        assert results[2][0][3] is results[2][0][9] is None
        assert results[2][0][5] is not None
    # One for the flags, then one for each gradient that any replica has, or for each dtype.
    assert [count for _, count in (*many, *few)] == [13] * 3 + [4] * 3


def _frozen_and_transposed(rank: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    transposed = nn.Parameter(torch.zeros(2, 3))
    transposed.grad = torch.full((3, 2), float(rank)).t()
    _average_over_replicas([frozen, transposed])
    return frozen.grad, transposed.grad


def _large(rank: int) -> list[float]:
    alone, first, second = (nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(3))
    for parameter in (alone, first, second):
        parameter.grad = torch.full((2,), 60000.0, dtype=torch.float16)
    _average_over_replicas([alone])
    _average_over_replicas([first, second])
    return [p.grad[0].item() for p in (alone, first, second) if p.grad is not None]


def _given(rank: int) -> None:
    """Average a list of gradients under NxD's name, in their memory."""
    gradients = [_gradient(rank, index) for index in range(14)]
    first = gradients[0]
    # A tied weight may be listed twice: each dtype has a bucket of its own tensors.
    with mock.patch.object(buckets, "BUCKET_BYTES", 1):
        bucket_allreduce_gradients([*gradients, first])
    for index, gradient in enumerate(gradients):
        both = [_gradient(other, index) / 2 for other in range(2)]
        assert torch.equal(gradient, both[0] + both[1])
    assert first is gradients[0]
    bucket_allreduce_gradients([])
    with pytest.raises(TypeError, match=r"has None in it: leave out parameters without a gradient"):
        bucket_allreduce_gradients([first, None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"which gradients are of experts"):
        bucket_allreduce_gradients([first], reduce_over_ep_group=True)
    with pytest.raises(ValueError, match=r"sparse=False"):
        bucket_allreduce_gradients([torch.zeros(2, 2).to_sparse()])


def _other_lists(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    bucket_allreduce_gradients([torch.ones(3), torch.ones(2 + rank)])


def test_other_gradients_on_a_replica_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"give bucket_allreduce_gradients other gradients, 2 to 2 of them"):
        run_ranks(2, _other_lists)


def _sparse(rank: int) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(4, 2\).*sparse=False"):
        _average_over_replicas(embedding.parameters())


def _special(rank: int) -> list[float]:
    parallel_state.initialize_model_parallel()
    frozen, transposed = _frozen_and_transposed(rank)
    assert frozen is None
    assert transposed is not None
    assert torch.equal(transposed, torch.full((2, 3), 0.5))
    _average_over_replicas([])
    _sparse(rank)
    found = _large(rank)
    _given(rank)
    return found


@pytest.mark.cpu_only("the fake accelerator has no sparse tensors")
def test_a_mean_within_float16_whose_sum_is_not() -> None:
    """Frozen, transposed, sparse and given gradients too."""
    assert run_ranks(2, _special) == [[60000.0] * 3] * 2
