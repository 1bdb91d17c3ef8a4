"""Memory in which what nobody has written is found."""

import pytest
import torch
from torch import nn

from nxdpp.initialization.allocation import allocate, count_unwritten

FLOATING = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
]


class Special(nn.Parameter):
    pass


@pytest.mark.parametrize("dtype", FLOATING)
def test_elements_are_counted_until_they_are_written(dtype: torch.dtype) -> None:
    tensor = allocate(torch.empty(5, 7, dtype=dtype, device="meta"))
    assert count_unwritten(tensor) == 35

    tensor[1:3] = torch.zeros(2, 7).to(dtype)
    assert count_unwritten(tensor) == 21

    tensor.copy_(torch.full((5, 7), float("nan")).to(dtype))
    assert count_unwritten(tensor) == 0


def test_more_than_fits_one_look() -> None:
    tensor = allocate(torch.empty(3_000_001, device="meta"))
    tensor[:-1] = 0

    assert count_unwritten(tensor) == 1


def test_any_bits_may_be_meant_by_whole_numbers() -> None:
    assert count_unwritten(allocate(torch.empty(3, dtype=torch.int64, device="meta"))) == 0
    assert allocate(torch.empty(3, dtype=torch.bool, device="meta")).shape == (3,)


def test_it_stays_the_same_kind_of_tensor() -> None:
    meta = Special(torch.empty(4, 6, device="meta").t(), requires_grad=False)
    meta.tensor_model_parallel = True  # type: ignore[attr-defined]

    real = allocate(meta)

    assert type(real) is Special
    assert not real.requires_grad
    assert real.tensor_model_parallel  # type: ignore[attr-defined]
    assert real.shape == (6, 4)
    assert real.stride() == meta.stride()
    assert type(allocate(torch.empty(2, device="meta"))) is torch.Tensor


def test_nothing_at_all() -> None:
    assert count_unwritten(allocate(torch.empty(0, 3, device="meta"))) == 0
