"""Query, key and value over ranks with copies of key-value heads equal three linear layers of one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nxdpp.ranks import parallel_state
from nxdpp.tensor.layers import RowParallelLinear
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear
from tests.pipeline.backward.split_and_plain import compare
from tests.support.local_slice import local_slice
from tests.support.run_ranks import run_ranks

HIDDEN, HEAD, HEADS = 12, 3, 8


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Context (B, S, D) of parts (B, S, D of the part)."""
    q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class _Whole(nn.Module):
    def __init__(self, key_value_heads: int, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=bias)
        self.k = nn.Linear(HIDDEN, key_value_heads * HEAD, bias=bias)
        self.v = nn.Linear(HIDDEN, key_value_heads * HEAD, bias=bias)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(_attention(self.q(x), self.k(x), self.v(x)))
        return y


class _Parallel(nn.Module):
    def __init__(self, key_value_heads: int, copies: int, gather: bool, sequence: bool, bias: bool) -> None:
        super().__init__()
        self.qkv = GQAQKVColumnParallelLinear(
            HIDDEN,
            [HEADS * HEAD, key_value_heads * HEAD],
            bias=bias,
            gather_output=gather,
            kv_size_multiplier=copies,
            sequence_parallel_enabled=sequence,
            sequence_dimension=1,
        )
        self.out = RowParallelLinear(
            HEADS * HEAD,
            HIDDEN,
            bias=False,
            input_is_parallel=not gather,
            sequence_parallel_enabled=sequence,
            sequence_dimension=1,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(_attention(*self.qkv(x)))
        return y


def _check(key_value_heads: int, copies: int, gather: bool, sequence: bool, bias: bool) -> None:
    torch.manual_seed(1)
    whole = _Whole(key_value_heads, bias)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model = _Parallel(key_value_heads, copies, gather, sequence, bias)
    assert torch.equal(torch.get_rng_state(), state)
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    x = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(2))
    theirs = x.clone().requires_grad_()
    given = (local_slice(x, 1, rank, size) if sequence else x).clone().requires_grad_()
    expected, found = whole(theirs), model(given)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (found * (local_slice(weights, 1, rank, size) if sequence else weights)).sum().backward()
    assert theirs.grad is not None
    own = [local_slice(each, 1, rank, size) if sequence else each for each in (expected, theirs.grad)]
    torch.testing.assert_close([found, given.grad], own, rtol=1e-5, atol=1e-6)
    for name, parameter in model.qkv.named_parameters():
        kind, letter = name.split("_")
        full = whole.get_submodule(letter).get_parameter(kind)
        partitions = vars(parameter)["num_partitions"]
        assert partitions == (size if letter == "q" else size // copies)
        assert full.grad is not None
        part = rank * partitions // size
        assert torch.equal(parameter, local_slice(full, 0, part, partitions)), name
        torch.testing.assert_close(
            parameter.grad, local_slice(full.grad, 0, part, partitions), rtol=1e-5, atol=1e-6, msg=name
        )


def _options(rank: int, size: int) -> None:
    """``fuse_qkv`` changes nothing, and copies of half weights are summed in float32."""
    built = []
    for fuse in (True, False):
        torch.manual_seed(1)
        built.append(
            GQAQKVColumnParallelLinear(
                HIDDEN, [24, 6], False, False, torch.float64, None, nn.init.normal_, False, False, size, fuse
            )
        )
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert all(torch.equal(one, other) for one, other in zip(built[0](x), built[1](x), strict=True))
    assert sorted(built[0].state_dict()) == ["weight_k", "weight_q", "weight_v"]
    with pytest.raises(AttributeError, match=r"has weight_q, weight_k and weight_v also with fuse_qkv=True: use these"):
        print(built[0].weight_qkv)
    assert not hasattr(built[0], "bias_qkv")
    half = GQAQKVColumnParallelLinear(
        1,
        [size, 1],
        False,
        gather_output=False,
        dtype=torch.bfloat16,
        kv_size_multiplier=size,
        reduce_dtype=torch.float32,
    )
    _, key, _ = half(torch.ones(1, 1, dtype=torch.bfloat16))
    key.backward(torch.full_like(key, 256.0 if rank == 0 else 1.0))
    assert half.weight_k.grad is not None
    assert half.weight_k.grad.item() == torch.tensor(256.0 + size - 1).bfloat16().item()


def _fused(size: int) -> None:
    """The file of NeuronX Distributed's ``fuse_qkv=True`` gives the three parameters."""
    options: dict[str, Any] = {"kv_size_multiplier": size, "gather_output": False}
    source, target = (nn.Sequential(GQAQKVColumnParallelLinear(HIDDEN, [24, 6], **options)) for _ in range(2))
    state = source.state_dict()
    fused = {f"0.{kind}_qkv": torch.cat([state[f"0.{kind}_{name}"] for name in "qkv"]) for kind in ("weight", "bias")}
    target.load_state_dict(fused)
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())
    if size == 4:
        some = nn.Sequential(GQAQKVColumnParallelLinear(HIDDEN, [24, 12], kv_size_multiplier=2, gather_output=False))
        with pytest.raises(ValueError, match=r"0\.weight_qkv with kv_size_multiplier=2 on 4 ranks: .* Convert its"):
            some.load_state_dict(fused)
    fused["0.weight_qkv"] = fused["0.weight_qkv"][1:]
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"0\.weight_qkv\""):
        target.load_state_dict(fused)


def _split() -> None:
    torch.manual_seed(1)
    batches = [[torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(seed))] for seed in range(3)]
    found = compare(nn.Sequential(_Parallel(2, 2, False, False, True), _Parallel(4, 1, False, False, True)), batches)
    assert found.weight_products in (0, 2 * 4 * 3)


def _cases(rank: int, size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for heads, copies in ((4, 1), (1, size), (2, size // 2)):
        for sequence in (False, True):
            _check(heads, copies, gather=False, sequence=sequence, bias=True)
        _check(heads, copies, gather=True, sequence=False, bias=False)
    _split()
    _options(rank, size)
    _fused(size)
    parallel_state.destroy_model_parallel()
    # The groups of copies are new ones.
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    _check(1, size, gather=False, sequence=False, bias=True)
    parallel_state.destroy_model_parallel()


def test_attention_equals_that_of_one_process() -> None:
    run_ranks(4, _cases, 4)


def test_refusals() -> None:
    parallel_state.initialize_debug(tensor_model_parallel_size=4)
    try:
        with pytest.raises(ValueError, match=r"query=24 and key_value=6 \* kv_size_multiplier=1 over 4 ranks"):
            GQAQKVColumnParallelLinear(HIDDEN, [24, 6])
        with pytest.raises(TypeError, match=r"fifth argument .* is dtype.*: give sequence_parallel_enabled=True and"):
            GQAQKVColumnParallelLinear(HIDDEN, [24, 8], False, False, True)  # type: ignore[arg-type]
    finally:
        parallel_state.destroy_model_parallel()
