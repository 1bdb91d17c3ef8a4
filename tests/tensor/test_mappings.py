"""Each mapping is its operation on the tensors of all ranks, and its gradient that of the whole computation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from tests.support.held_tensors import held_tensors, holds_graph
from tests.support.local_slice import local_slice
from tests.support.run_ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16)


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # Small integers: sums are exact in every dtype.
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _check(
    mapping: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    forward: Callable[[list[torch.Tensor], int], torch.Tensor],
    backward: Callable[[list[torch.Tensor], int], torch.Tensor],
) -> None:
    """Compare with ``forward`` and ``backward``, functions of all ranks' tensors and the rank."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    everyones = [_values(each, shape, dtype) for each in range(size)]
    given = everyones[rank].clone().requires_grad_()
    with held_tensors() as held:
        # A part of a graph, not a leaf: gloo's threads, which may free their tensors last, must not hold it.
        found = mapping(given * 1)
    assert not any(map(holds_graph, held))
    assert torch.equal(found, forward(everyones, rank))
    gradients = [_values(10 + each, tuple(found.shape), dtype) for each in range(size)]
    # In place, as an activation may be.
    found.mul_(1).backward(gradients[rank])
    assert given.grad is not None
    assert torch.equal(given.grad, backward(gradients, rank))
    assert torch.equal(given, everyones[rank])
    # A view of the input is no contiguous tensor.
    turned = everyones[rank].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(mapping(turned), found)
    with FakeTensorMode() as mode:
        fake = mapping(mode.from_tensor(everyones[rank]))
    assert (fake.shape, fake.dtype) == (found.shape, found.dtype)
    assert mapping(everyones[rank].to("meta")).shape == found.shape


def _sum(tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def _own(tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    return tensors[rank]


def _join(dim: int, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat(tensors, dim)


def _part(dim: int, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    return local_slice(tensors[rank], dim, rank, len(tensors))


def _part_of_sum(dim: int, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    return local_slice(_sum(tensors, rank), dim, rank, len(tensors))


def _cases(rank: int, size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for dtype in DTYPES:
        for shape in ((8, 4), (4, 8, 4)):
            check: Any = partial(_check, shape=shape, dtype=dtype)
            last = len(shape) - 1
            check(mappings.copy_to_tensor_model_parallel_region, forward=_own, backward=_sum)
            check(mappings.reduce_from_tensor_model_parallel_region, forward=_sum, backward=_own)
            check(
                mappings.scatter_to_tensor_model_parallel_region,
                forward=partial(_part, last),
                backward=partial(_join, last),
            )
            check(
                mappings.gather_from_tensor_model_parallel_region,
                forward=partial(_join, last),
                backward=partial(_part, last),
            )
            for dim in (0, 1, -1):
                sequence: dict[str, Any] = {"sequence_dimension": dim}
                check(
                    partial(mappings.scatter_to_sequence_parallel_region, **sequence),
                    forward=partial(_part, dim),
                    backward=partial(_join, dim),
                )
                check(
                    partial(mappings.gather_from_sequence_parallel_region, **sequence),
                    forward=partial(_join, dim),
                    backward=partial(_part_of_sum, dim),
                )
                check(
                    partial(mappings.gather_from_sequence_parallel_region, to_model_parallel=False, **sequence),
                    forward=partial(_join, dim),
                    backward=partial(_part, dim),
                )
                check(
                    partial(mappings.reduce_scatter_to_sequence_parallel_region, **sequence),
                    forward=partial(_part_of_sum, dim),
                    backward=partial(_join, dim),
                )
    for mapping in (mappings.scatter_to_sequence_parallel_region, mappings.reduce_scatter_to_sequence_parallel_region):
        with pytest.raises(ValueError, match=rf"dimension 0 .*\(5, 2\).*: 5 = {size} \* {5 // size} \+ 1"):
            mapping(torch.zeros(5, 2))
    group = parallel_state.get_tensor_model_parallel_group()
    given = mappings.reduce_from_tensor_model_parallel_region(torch.ones(2), process_group=group)
    assert torch.equal(given, torch.full((2,), float(size)))
    parallel_state.destroy_model_parallel()


def test_mappings() -> None:
    run_ranks(2, _cases, 2)
