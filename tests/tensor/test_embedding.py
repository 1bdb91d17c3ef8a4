"""``ParallelEmbedding``: both orders of its arguments, division of the columns, and what it refuses.

``test_layers`` compares it with ``torch.nn.Embedding``.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import init

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.embedding import ParallelEmbedding
from nxdpp.tensor.padding import whole_of
from tests.support.run_ranks import run_ranks


def _columns(width: int, padding_idx: int | None) -> None:
    torch.manual_seed(2)
    whole = nn.Embedding(9, width, padding_idx)
    torch.manual_seed(2)
    part = ParallelEmbedding(9, width, padding_idx, shard_across_embedding=True)
    assert torch.equal(whole_of(part.weight), whole.weight)
    ids = torch.tensor([[0, 8, 3], [4, 4, 2]])
    found, expected = part(ids), whole(ids)
    assert torch.equal(found, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert part.weight.grad is not None
    vars(part.weight.grad).update(vars(part.weight))
    assert whole.weight.grad is not None
    assert torch.equal(whole_of(part.weight.grad), whole.weight.grad)
    # Other devices tell it later.
    if ids.is_cpu:
        with pytest.raises(IndexError):
            part(torch.tensor([9]))


def _without_collective() -> None:
    torch.manual_seed(2)
    whole = nn.Embedding(9, 8)
    ids = torch.arange(9).view(3, 3)
    joins: dict[bool, Any] = {
        True: mappings.gather_from_tensor_model_parallel_region,
        False: mappings.reduce_from_tensor_model_parallel_region,
    }
    for across, join in joins.items():
        torch.manual_seed(2)
        part = ParallelEmbedding(
            9, 8, init_method=init.normal_, shard_across_embedding=across, pad=True, collect_output=False
        )
        assert torch.equal(join(part(ids), parallel_state.get_tensor_model_parallel_group()), whole(ids))


def _cases(rank: int) -> None:
    for size in (2,):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        for width, padding_idx in ((8, None), (6, 4), (3, 8)):
            _columns(width, padding_idx)
        _without_collective()
        parallel_state.destroy_model_parallel()


def test_columns_are_divided() -> None:
    run_ranks(2, _cases)


@pytest.fixture
def second_of_two() -> Iterator[None]:
    parallel_state.initialize_debug(tensor_model_parallel_rank=1, tensor_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("second_of_two")
def test_arguments_have_the_order_of_nxd_or_of_its_guide() -> None:
    half = torch.bfloat16
    nxd = ParallelEmbedding(6, 4, 5, 2.0, 1.0, False, False, init.ones_, torch.device("cpu"), half)
    assert (nxd.padding_idx, nxd.max_norm, nxd.norm_type, nxd.weight.dtype) == (5, 2.0, 1.0, half)
    assert nxd.weight[:, 0].tolist() == [1, 1, 0]
    script = ParallelEmbedding(6, 4, None, init_method=init.ones_, sequence_parallel_enabled=True, dtype=half)
    assert bool((script.weight == 1).all())
    guide = ParallelEmbedding(6, 4, init.ones_, half, torch.device("meta"))
    assert (guide.weight.dtype, guide.weight.device.type, guide.max_norm, guide.norm_type) == (half, "meta", None, 2.0)
    default: Any = partial(ParallelEmbedding, 6, 4, init.ones_)
    assert (default().weight.dtype, default(half).weight.device.type) == (torch.float32, "cpu")
    assert bool((default(half, None).weight == 1).all())


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, torch.float16), "max_norm=torch.float16 and norm_type=2.0 must be numbers"),
        ((None, None, 2.0, True), "averages and ZeRO-1 take dense gradients"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelEmbedding(6, 4, *arguments)
    for further in ({"max_norm": 1.0}, {"sequence_parallel_enabled": True}):
        with pytest.raises(ValueError, match="shard_across_embedding=True goes without"):
            ParallelEmbedding(6, 4, shard_across_embedding=True, **further)
