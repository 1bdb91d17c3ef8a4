"""Attributes of tensor-parallel parameters, and the moves and copies that keep them."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.ranks import parallel_state
from nxdpp.tensor.layer_norm import LayerNorm
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.utils import (
    param_is_not_tensor_parallel_duplicate,
)

NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions", "sequence_parallel_enabled")
EXPECTED: dict[str, tuple[Any, ...]] = {
    "0.weight": (True, 0, 1, 2, None),
    "1.weight": (None, None, None, None, True),
    "1.bias": (None, None, None, None, True),
    "2.weight": (True, 0, 3, 2, None),
    "2.bias": (True, 0, 3, 2, None),
    "3.weight": (True, 1, 1, 2, None),
    "3.bias": (False, -1, 1, 1, True),
}


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    parallel_state.initialize_debug(tensor_model_parallel_rank=1, tensor_model_parallel_size=2)
    yield nn.Sequential(
        ParallelEmbedding(9, 6),
        LayerNorm(6, sequence_parallel_enabled=True),
        ColumnParallelLinear(6, 12, stride=3, gather_output=False),
        RowParallelLinear(12, 6, input_is_parallel=True, sequence_parallel_enabled=True),
    )
    parallel_state.destroy_model_parallel()


def _attributes(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(getattr(p, key, None) for key in NAMES) for name, p in model.named_parameters()}


def test_attributes(model: nn.Sequential) -> None:
    assert _attributes(model) == EXPECTED
    counted = {
        name for name, parameter in model.named_parameters() if param_is_not_tensor_parallel_duplicate(parameter)
    }
    assert counted == {"0.weight", "2.weight", "2.bias", "3.weight"}


def test_moves_and_copies_keep_them(model: nn.Sequential) -> None:
    assert _attributes(copy.deepcopy(model)) == EXPECTED
    assert _attributes(model.to(torch.bfloat16)) == EXPECTED
    before = model[0].weight
    model.to("meta")
    assert model[0].weight is not before
    assert _attributes(model) == EXPECTED
    assert _attributes(model.to_empty(device="cpu")) == EXPECTED
    move_model_to_device(model, "meta")
    assert _attributes(model) == EXPECTED


def test_parameters_that_are_set_get_them(model: nn.Sequential) -> None:
    before = dict(model.named_parameters())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert not any(parameter is before[name] for name, parameter in model.named_parameters())
    assert _attributes(model) == EXPECTED
    model[2].weight = nn.Parameter(torch.zeros(6, 6))
    assert _attributes(model) == EXPECTED
    # A parameter of another size is no such part; one with attributes keeps them.
    model[2].weight = nn.Parameter(torch.zeros(12, 6))
    assert not hasattr(model[2].weight, "partition_dim")
    model[3].weight = model[0].weight
    assert vars(model[0].weight)["partition_dim"] == 0
