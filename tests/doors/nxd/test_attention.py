"""Attention of NeuronX Distributed's scripts, compared with a plain softmax."""

import pytest
import torch

from nxdpp.doors.nxd.attention import nki_flash_attn_func, nki_ring_attn_func

BATCH, HEADS, LENGTH, SIZE = 2, 3, 5, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = torch.randn(3, BATCH, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(0))
    return query, key, value


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_a_softmax_of_products(causal: bool) -> None:
    query, key, value = inputs()
    weights = query @ key.transpose(-2, -1) * 0.3
    if causal:
        weights = weights.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    expected = weights.softmax(-1) @ value
    q, k, v = (each.transpose(-2, -1) for each in (query, key, value))
    torch.testing.assert_close(nki_flash_attn_func(q, k, v, softmax_scale=0.3, causal=causal), expected)
    found = nki_flash_attn_func(query, key, value, softmax_scale=0.3, causal=causal, transpose_nki_inputs=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(nki_ring_attn_func(query, key, value, 0, [], 0.0, 0.3, causal), expected)


def test_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call torch\.manual_seed before the step"):
        nki_flash_attn_func(*inputs(), 1, 0.0, None, True, True, torch.zeros(1))
