"""Marks of missing gradients: told from every gradient that an operation computes."""

import pytest
import torch

from nxdpp.pipeline.p2p.missing_gradients import are_zeros, is_mark, mark_like, zeros_like

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4)])
def test_a_mark_is_seen_and_no_other_value_is_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    like = torch.ones(shape, dtype=dtype)

    mark = mark_like(like)
    assert mark.dtype == dtype
    assert mark.shape == shape
    assert is_mark(mark)
    assert torch.isnan(mark).all()
    for value in (0.0, 1.0, float("nan"), float("inf")):
        other = like * value
        assert not is_mark(other)
        assert not is_mark(-other)
        assert not is_mark(other - other)


def test_the_memory_of_a_mark_has_the_strides_of_the_tensor() -> None:
    like = torch.ones(2, 3, 4).permute(2, 0, 1)

    assert mark_like(like).stride() == like.stride()
    assert is_mark(mark_like(like))


def test_tensors_that_cannot_be_marks() -> None:
    assert not is_mark(mark_like(torch.empty(0)))
    assert not is_mark(torch.zeros(3, dtype=torch.float8_e5m2))
    with pytest.raises(TypeError, match="no mark"):
        mark_like(torch.zeros(3, dtype=torch.float8_e5m2))


def test_zeros_change_no_sum() -> None:
    values = torch.tensor([0.0, -0.0, 3.0])

    assert are_zeros(zeros_like(values))
    assert torch.equal((values + zeros_like(values)).signbit(), values.signbit())
    assert not are_zeros(values)
