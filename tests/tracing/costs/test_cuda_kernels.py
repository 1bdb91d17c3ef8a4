"""Dropout with the operations and the memory that it has on CUDA."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from nxdpp.devices.live_bytes import LiveBytes
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.machine import DEVICES, Job, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.tracing.costs.cuda_modes import CudaKernels

PROBABILITIES = 4 * 64 * 64 * 4


@pytest.mark.parametrize("is_causal", [(), (False,)])
def test_attention_with_dropout_makes_no_probabilities(is_causal: tuple[bool, ...]) -> None:
    with FakeTensorMode(), CudaKernels(), LiveBytes() as live:
        query = torch.randn(1, 4, 64, 8)
        live.know([query])
        before = live.peak
        F.scaled_dot_product_attention(query, query, query, None, 0.1, *is_causal)

    assert live.peak - before < PROBABILITIES


def test_attention_in_half_repeats_no_keys_and_takes_narrow_values() -> None:
    with FakeTensorMode(), CudaKernels(), LiveBytes() as live:
        query, key = (torch.randn(1, heads, 64, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        before = live.now
        attended = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        # The result, and a float32 number of each query.
        assert live.now - before == 4 * 64 * 8 * 2 + 4 * 64 * 4
        attended.sum().backward()
        assert key.grad is not None
        assert F.scaled_dot_product_attention(query, query, query[..., :6]).shape[-1] == 6


def test_dropout_keeps_a_mask_of_bytes() -> None:
    with FakeTensorMode(), CudaKernels(), LiveBytes() as live:
        x = torch.randn(1000, requires_grad=True)
        before = live.now
        y = nn.Dropout(0.1)(x)
        assert live.now - before == 4000 + 1000
        y.sum().backward()
        assert nn.Dropout(0.1).eval()(x) is x


def _held(device: str, dropout: float) -> float:
    """Bytes that the first layer of a GPT holds for its backward."""
    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        attn_pdrop=dropout, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    job = Job(1, lambda size: microbatch_on_meta(model, size, 64))
    return ModelCosts(model, Machine(1, 10**9, DEVICES[device]), job).of(1, False, 1).layers[0].held


def test_a_plan_for_cuda_has_no_probabilities() -> None:
    held = _held("a100", 0.1)
    assert held == _held("a100", 0.0)
    assert _held("cpu", 0.1) >= held + PROBABILITIES
