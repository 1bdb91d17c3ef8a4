"""A model with padded heads has the outputs, gradients and trained parameters of the unpadded one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nxdpp import deferred_init, init_on_device
from nxdpp.ranks import parallel_state
from nxdpp.tensor.layers import ColumnParallelLinear, RowParallelLinear
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxdpp.tensor.pad import get_number_of_extra_heads, pad_model
from nxdpp.tensor.padding import own_ranges, whole_of
from nxdpp.tensor.utils import divide
from tests.support.run_ranks import run_ranks

HEAD, INNER = 4, 24
# Heads, key-value heads, form of the attention's layers, and whether only the attention is padded.
CASES = [(6, 3, "plain", False), (6, 1, "copies", True), (6, 6, "fused", False)]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Context (B, S, heads * D); the number of key-value heads follows from their size."""
    q, k, v = (each.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention of ``heads`` query and ``others`` key-value heads, divided by ``kind``, or whole for ``None``."""

    def __init__(self, heads: int, others: int, kind: str | None) -> None:
        super().__init__()
        size, other = heads * HEAD, others * HEAD
        ranks = 1 if kind is None else parallel_state.get_tensor_model_parallel_size()
        self.heads = divide(heads + get_number_of_extra_heads(heads, ranks), ranks)
        self.kind = kind
        column: Any = nn.Linear if kind is None else partial(ColumnParallelLinear, gather_output=False, pad=True)
        if kind == "fused":
            self.qkv = column(size, 3 * size, stride=3)
        elif kind == "copies":
            self.qkv = GQAQKVColumnParallelLinear(size, [size, other], gather_output=False, kv_size_multiplier=ranks)
        else:
            self.q, self.k, self.v = column(size, size), column(size, other), column(size, other)
        self.out: nn.Module = (
            nn.Linear(size, size) if kind is None else RowParallelLinear(size, size, input_is_parallel=True, pad=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "fused":
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            q, k, v = self.qkv(x) if self.kind == "copies" else (self.q(x), self.k(x), self.v(x))
        y: torch.Tensor = self.out(_attend(q, k, v, self.heads))
        return y


class Block(nn.Module):
    """Attention, and two linear layers with an activation that is not 0 at 0."""

    def __init__(self, heads: int, others: int, kind: str | None) -> None:
        super().__init__()
        self.attention = Attention(heads, others, kind)
        size = heads * HEAD
        if kind is None:
            self.up: nn.Module = nn.Linear(size, INNER)
            self.down: nn.Module = nn.Linear(INNER, size)
        else:
            self.up = ColumnParallelLinear(size, INNER, gather_output=False)
            self.down = RowParallelLinear(INNER, size, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        y: torch.Tensor = x + self.down(self.up(x).sigmoid())
        return y


def _names(kind: str) -> Callable[[str], list[str]]:
    """Names of the whole model's parameters that a parameter has, in order."""
    if kind == "fused":
        return lambda name: [name.replace("qkv", letter) for letter in "qkv"] if "qkv" in name else [name]
    if kind == "copies":
        return lambda name: [f"attention.{name[-1]}.{name.split('.')[-1][:-2]}"] if "qkv" in name else [name]
    return lambda name: [name]


def _expected(found: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole``, with zeros for padding."""
    dim = vars(found)["partition_dim"]
    if dim < 0:
        return whole
    result = torch.zeros(found.shape)
    for start, own, count in own_ranges(found):
        result.narrow(dim, own, count).copy_(whole.narrow(dim, start, count))
    return result


def _compare(model: nn.Module, whole: nn.Module, kind: str, gradients: bool) -> None:
    named = {name: (parameter.grad if gradients else parameter) for name, parameter in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        parts = [named[each] for each in _names(kind)(name)]
        expected = _expected(parameter, torch.cat([part.detach() for part in parts if part is not None]))
        found = parameter.grad if gradients else parameter.detach()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


def _train(heads: int, others: int, kind: str, wrapped: bool, on_meta: bool) -> None:
    """Two steps; not of Adam, which makes a step of the rounding of the key bias's gradient, 0."""
    size = parallel_state.get_tensor_model_parallel_size()
    torch.manual_seed(4)
    whole = Block(heads, others, None)
    torch.manual_seed(4)
    classes = (Attention,) if wrapped else ()
    if on_meta:
        with init_on_device(torch.device("meta")):
            model = Block(heads, others, kind)
        pad_model(model, size, heads, wrapped_classes=classes)
        model.to_empty(device=whole.attention.q.weight.device)
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | GQAQKVColumnParallelLinear):
                module.reset_parameters()
    else:
        model = Block(heads, others, kind)
        assert pad_model(model, size, heads, wrapped_classes=classes) is model
    if kind == "plain":
        _compare(model, whole, kind, gradients=False)
        assert torch.equal(whole_of(model.attention.q.weight), whole.attention.q.weight)
    else:
        _copy_values(model, whole, kind)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1) for each in (model, whole)]
    for step in range(2):
        x = torch.randn(2, 3, heads * HEAD, generator=torch.Generator().manual_seed(step))
        given, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = model(given), whole(theirs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for output in (found, expected):
            output.square().mean().backward()
        torch.testing.assert_close(given.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        _compare(model, whole, kind, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _compare(model, whole, kind, gradients=False)


def _copy_values(model: nn.Module, whole: nn.Module, kind: str) -> None:
    named = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_expected(parameter, torch.cat([named[each] for each in _names(kind)(name)])))


def _cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    for heads, others, kind, wrapped in CASES:
        for on_meta in (False, True):
            _train(heads, others, kind, wrapped, on_meta)
    parallel_state.destroy_model_parallel()


def test_padded_models_train_as_unpadded_ones() -> None:
    run_ranks(4, _cases)


@pytest.fixture
def two_ranks() -> Any:
    parallel_state.initialize_debug(tensor_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with init_on_device(torch.device("meta")):
        return build()


class _Flat(Attention):
    """A language model of one module: attention with a head of 7 outputs beside it."""

    def __init__(self, heads: int, kind: str | None) -> None:
        super().__init__(heads, heads, kind)
        size = heads * HEAD
        self.head: nn.Module = nn.Linear(size, 7) if kind is None else ColumnParallelLinear(size, 7, pad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(super().forward(x))
        return y


@pytest.mark.usefixtures("two_ranks")
def test_a_head_beside_the_attention_stays_as_it_is() -> None:
    for gather in (True, False):
        model: Any = _on_meta(lambda: _Flat(3, "plain"))
        model.head.gather_output = gather
        pad_model(model, 2, 3)
        shapes = [module.weight.shape for module in (model.q, model.out, model.head)]
        assert shapes == [(8, 12), (12, 8), (4, 12)]


def test_heads_are_padded_for_more_ranks_than_there_are() -> None:
    """In one process: 3 heads become 8."""
    parallel_state.initialize_model_parallel()
    try:
        for degree in (8,):
            torch.manual_seed(1)
            expected = _Flat(3, "plain")
            torch.manual_seed(1)
            model = pad_model(_Flat(3, "plain"), degree, 3)
            model.heads += get_number_of_extra_heads(3, degree)
            assert model.q.weight.shape == (degree * HEAD, 12)
            x = torch.randn(2, 3, 12)
            torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-6)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("two_ranks")
def test_refusals() -> None:
    def pads(match: str, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        before = dict(model.named_parameters())
        with pytest.raises((ValueError, RuntimeError), match=match):
            pad_model(model, *args, **kwargs)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())

    block = _on_meta(lambda: Block(3, 3, "plain"))
    pads("tp_degree=3 is no multiple of the tensor-parallel size 2", block, 3, 3)
    pads(r"no module of wrapped_classes \(LSTM\)", block, 2, 3, [nn.LSTM])
    pads("pad_hook_fn is called with", block, 2, 3, pad_hook_fn=print)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    pads("SGD.* holds .*Make the optimizer after pad_model", block, 2, 3)
    del optimizer
    with pytest.raises(RuntimeError, match="init_on_device"):
        deferred_init(lambda: pad_model(Block(3, 3, "plain"), 2, 3))
