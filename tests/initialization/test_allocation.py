"""Marked memory, in which unwritten elements are counted."""

import pytest
import torch
from torch import nn

from nxdpp.initialization.allocation import allocate, count_unwritten

FLOATING = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
]


class Special(nn.Parameter):
    pass


@pytest.mark.parametrize("dtype", FLOATING)
def test_count_of_unwritten_elements(dtype: torch.dtype) -> None:
    tensor = allocate(torch.empty(5, 7, dtype=dtype, device="meta"))
    assert count_unwritten(tensor) == 35

    tensor[1:3] = torch.zeros(2, 7).to(dtype)
    assert count_unwritten(tensor) == 21

    tensor.copy_(torch.full((5, 7), float("nan")).to(dtype))
    assert count_unwritten(tensor) == 0


def test_allocation_keeps_class_strides_and_attributes() -> None:
    meta = Special(torch.empty(4, 6, device="meta").t(), requires_grad=False)
    meta.tensor_model_parallel = True  # type: ignore[attr-defined]

    real = allocate(meta)

    assert type(real) is Special
    assert not real.requires_grad
    assert real.tensor_model_parallel  # type: ignore[attr-defined]
    assert real.shape == (6, 4)
    assert real.stride() == meta.stride()
    assert type(allocate(torch.empty(2, device="meta"))) is torch.Tensor
