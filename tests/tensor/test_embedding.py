"""``ParallelEmbedding``: both orders of its arguments, and what it refuses.

``test_layers`` compares it with ``torch.nn.Embedding``.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import init

from nxdpp.ranks import parallel_state
from nxdpp.tensor.embedding import ParallelEmbedding


@pytest.fixture
def second_of_two() -> Iterator[None]:
    parallel_state.initialize_debug(tensor_model_parallel_rank=1, tensor_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("second_of_two")
def test_arguments_have_the_order_of_nxd_or_of_its_guide() -> None:
    half = torch.bfloat16
    nxd = ParallelEmbedding(6, 4, 5, None, 2.0, False, False, init.ones_, torch.device("cpu"), half)
    assert (nxd.padding_idx, nxd.weight.dtype) == (5, half)
    assert nxd.weight[:, 0].tolist() == [1, 1, 0]
    script = ParallelEmbedding(6, 4, None, init_method=init.ones_, sequence_parallel_enabled=True, dtype=half)
    assert bool((script.weight == 1).all())
    guide = ParallelEmbedding(6, 4, init.ones_, half, torch.device("meta"))
    assert (guide.weight.dtype, guide.weight.device.type) == (half, "meta")
    default: Any = partial(ParallelEmbedding, 6, 4, init.ones_)
    assert (default().weight.dtype, default(half).weight.device.type) == (torch.float32, "cpu")
    assert bool((default(half, None).weight == 1).all())


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, torch.float16), "max_norm=torch.float16 and norm_type=2.0 are not supported"),
        ((None, None, 2.0, True), "averages and ZeRO-1 take dense gradients"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelEmbedding(6, 4, *arguments)
    with pytest.raises(ValueError, match="shard_across_embedding=True are not supported"):
        ParallelEmbedding(6, 4, shard_across_embedding=True)
