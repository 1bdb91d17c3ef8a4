"""Attributes of tensor-parallel parameters, and the moves and copies that keep them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.ranks import parallel_state
from nxdpp.tensor.layer_norm import LayerNorm
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.sequence_parallel import StepGradients, marked
from nxdpp.tensor.tensor_attributes import is_sequence_parallel, mark_sequence_parallel
from nxdpp.tensor.utils import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
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


def test_marks_of_other_modules_come_back(model: nn.Sequential) -> None:
    norms = nn.Sequential(nn.LayerNorm(6), nn.Identity(), nn.RMSNorm(6))
    mark_sequence_parallel(norms)
    mark_sequence_parallel(norms)
    assert [len(module._forward_pre_hooks) for module in norms] == [1, 0, 1]

    def run(module: nn.Module) -> None:
        module(torch.zeros(2, 6))

    takes: list[Callable[[nn.Module], object]] = [StepGradients, run]
    for take in takes:
        copied = copy.deepcopy(norms)
        assert not any(is_sequence_parallel(parameter) for parameter in copied.parameters())
        take(copied)
        assert len(marked(copied.parameters())) == 3
        copied.to("meta").to_empty(device="cpu")
        take(copied)
        assert len(marked(copied.parameters())) == 3


def test_copies_of_compiled_layers_are_not_compiled(model: nn.Sequential) -> None:
    model[0].compile(backend="eager")
    assert copy.deepcopy(model)[0]._compiled_call_impl is None


def test_copies_share_what_their_originals_share(model: nn.Sequential) -> None:
    head = ColumnParallelLinear(6, 10, bias=False)
    head.weight = model[0].weight  # type: ignore[assignment]
    copied = copy.deepcopy(nn.Sequential(model, head))
    assert copied[1].weight is copied[0][0].weight  # type: ignore[index]


def test_defaults_and_copies_of_attributes(model: nn.Sequential) -> None:
    tensor = torch.zeros(1)
    set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
    assert tuple(getattr(tensor, name, None) for name in NAMES) == (False, -1, 1, 1, None)
    other = torch.zeros(1)
    copy_tensor_model_parallel_attributes(other, model[3].bias)  # type: ignore[arg-type]
    assert tuple(getattr(other, name) for name in NAMES) == EXPECTED["3.bias"]
