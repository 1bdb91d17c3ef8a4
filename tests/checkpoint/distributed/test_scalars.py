"""Numbers of an optimizer's state come back exactly, in JSON."""

import json
import math
from typing import Any

import pytest
import torch

from nxdpp.checkpoint.distributed.structured import dtype_named, is_scalar, read_scalar, written_scalar

CPU = torch.device("cpu")
NUMBERS = [None, True, 0, 2**80, 0.1, -0.0, math.inf, -math.inf]
TENSORS = [
    torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor(3.0, dtype=torch.float8_e5m2), torch.tensor(-math.inf), torch.tensor(2**63 - 1), torch.tensor(True),
    torch.tensor(7, dtype=torch.uint8), torch.tensor(1e-45), torch.tensor(-0.0),
]  # fmt: skip


def round_trip(value: Any) -> Any:
    assert is_scalar(value)
    return read_scalar(json.loads(json.dumps(written_scalar(value), allow_nan=False)), CPU)


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_come_back(value: Any) -> None:
    found = round_trip(value)
    assert (type(found), repr(found)) == (type(value), repr(value))


@pytest.mark.parametrize("value", TENSORS, ids=repr)
def test_tensors_without_dimensions_come_back(value: torch.Tensor) -> None:
    found = round_trip(value)
    assert (found.dtype, found.shape, repr(found.item())) == (value.dtype, value.shape, repr(value.item()))


def test_nan_comes_back() -> None:
    assert math.isnan(round_trip(math.nan))
    assert round_trip(torch.tensor(math.nan)).isnan()


@pytest.mark.parametrize("value", [torch.zeros(1), torch.tensor(1j), "text", [1], 1j])
def test_others_are_no_scalars(value: Any) -> None:
    assert not is_scalar(value)


@pytest.mark.parametrize("name", ["nn", "load", "", "float33", "torch.float32", "__dict__"])
def test_other_names_are_no_dtypes(name: str) -> None:
    with pytest.raises(ValueError, match="is not a dtype of torch"):
        dtype_named(name)
