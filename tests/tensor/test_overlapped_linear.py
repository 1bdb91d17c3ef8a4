"""Backward of parallel layers: split, under autocast, recomputed, with frozen parameters, not differentiated twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdpp.pipeline.backward import structure
from nxdpp.ranks import parallel_state
from nxdpp.tensor.layers import ColumnParallelLinear, RowParallelLinear
from nxdpp.tensor.loss_functions import parallel_cross_entropy
from tests.pipeline.backward.split_and_plain import compare
from tests.support.run_ranks import run_ranks

SIZE, INNER = 8, 24


class _Gated(nn.Module):
    """Two column-parallel layers with one input, and a row-parallel layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up = ColumnParallelLinear(SIZE, INNER, gather_output=False, **options)
        self.gate = ColumnParallelLinear(SIZE, INNER, bias=False, gather_output=False, **options)
        self.down = RowParallelLinear(INNER, SIZE, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        y: torch.Tensor = x + self.down(self.up(hidden).relu_() * self.gate(hidden))
        return y


class _Recomputed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.module, x, use_reentrant=False)
        return y


def _x(seed: int) -> torch.Tensor:
    return torch.randn(4, 2, SIZE, generator=torch.Generator().manual_seed(seed))


def _split() -> None:
    """Three products of each module wait, of each of four microbatches; nothing is computed twice."""
    sequence = {"sequence_parallel_enabled": True}
    for options in ({}, sequence, {**sequence, "sequence_dimension": 1}):
        torch.manual_seed(0)
        found = compare(nn.Sequential(_Gated(**options), _Gated(**options)), [[_x(seed)] for seed in range(4)])
        if structure.HOOKS_ARE_SHOWN:
            assert found.weight_products == 3 * 2 * 4
        assert found.analyses == 1
    torch.manual_seed(0)
    compare(nn.Sequential(_Gated(), _Recomputed(_Gated())), [[_x(seed)] for seed in range(4)])


def _gradients(module: nn.Module, x: torch.Tensor, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    run(module, x).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return {**gradients, "x": x.grad}


def _autocast(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y: torch.Tensor = module(x)
    return y.float()


def _plain(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module(x)
    return y


def _same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance)


def _others() -> None:
    torch.manual_seed(0)
    module = _Gated()
    expected = _gradients(module, _x(1), _plain)
    _same(_gradients(_Recomputed(module), _x(1), _plain), {f"module.{n}": g for n, g in expected.items() if n != "x"})
    # The sum of all ranks' gradients does not depend on what else is trained.
    module.up.weight.requires_grad_(False)
    frozen = _gradients(module, _x(1), _plain)
    _same(frozen, {**expected, "up.weight": None}, 1e-6)
    module.up.weight.requires_grad_(True)
    with torch.no_grad():
        assert not module(_x(1)).requires_grad
    # A leaf without a gradient gets none, and the weights are the same.
    x = _x(1)
    module.norm.requires_grad_(False)
    module(x).square().sum().backward()
    _same({n: p.grad for n, p in module.named_parameters()}, {"up.weight": expected["up.weight"]}, 1e-6)
    module.zero_grad()
    found = _gradients(module, _x(1), _autocast)
    _same(found, {"up.weight": expected["up.weight"], "x": expected["x"]}, 1e-1)
    assert found["up.weight"].dtype == torch.float32


def _twice() -> None:
    """A second derivative would lack terms, since collectives have none: it is refused."""
    labels = torch.zeros(2, dtype=torch.long)
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        ColumnParallelLinear(SIZE, SIZE),
        RowParallelLinear(SIZE, SIZE),
        lambda x: parallel_cross_entropy(x, labels),
    ]
    for function in functions:
        x = torch.ones(2, SIZE, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()
    column = ColumnParallelLinear(SIZE, SIZE, gather_output=False)
    (gradient,) = torch.autograd.grad(column(x).square().sum(), column.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def _cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _split()
    _others()
    _twice()
    parallel_state.destroy_model_parallel()


def test_backwards() -> None:
    run_ranks(2, _cases)
