"""Tensors outside the layers are made in each step; random tensors and numbers are refused."""

import random
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy
import pytest
import torch
from torch import arange, finfo, is_tensor, nn, rand
from torch import cat as joined
from torch import seed as new_seed
from torch import zeros as nothing

from nxdpp.tracing.graph.errors import TracingError
from tests.support import other_names
from tests.support.traced_models import PlainLayer, PlainModel, PreparedModel, options_for, run_graph, trace_with

CONSTRUCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda h: h + torch.arange(h.shape[0], device=h.device).unsqueeze(1),
    lambda h: h + torch.zeros(h.size(0), 4, dtype=h.dtype),
    lambda h: h + torch.full((h.shape[0], 4), 3.0),
    lambda h: h + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    lambda h: h @ torch.eye(h.shape[-1]),
    lambda h: h + torch.linspace(0, 1, h.shape[-1]),
    lambda h: h.clamp(min=torch.finfo(h.dtype).min, max=1 / torch.finfo(torch.float32).eps),
    lambda h: torch.tril(torch.ones(h.shape[0], h.shape[0])) @ h,
    lambda h: h + torch.ones_like(h) - torch.zeros_like(h),
    lambda h: h + h.new_ones(h.shape[0], 4),
    # A sequence that is one traced value.
    lambda h: torch.cat(h.split(2, dim=-1), dim=-1) + torch.cat(tensors=h.split(2, dim=-1), dim=-1),
    lambda h: torch.stack(h.unbind(-1), dim=-1),
    # Under other names.
    lambda h: joined(h.split(2, dim=-1), -1),
    lambda h: h + arange(h.shape[0]).unsqueeze(1),
    lambda h: h + nothing(h.size(0), 4, dtype=h.dtype),
    lambda h: h * finfo(h.dtype).eps if is_tensor(h) else h,
    lambda h: other_names.positions(h),
]


def _all_of_them(hidden: torch.Tensor) -> torch.Tensor:
    for function in CONSTRUCTIONS:
        hidden = function(hidden)
    return hidden


def _trace(model: nn.Module):  # type: ignore[no-untyped-def]
    return trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))


def test_a_tensor_made_in_the_spine_follows_the_size_of_the_batch() -> None:
    model, before = PreparedModel(_all_of_them), dict(vars(torch))
    traced = _trace(model)
    assert not [name for name in before if vars(torch)[name] is not before[name]]
    for rows in (2, 7):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(run_graph(model, traced, {"x": x}), model(x))


@pytest.mark.parametrize(
    "function", [lambda h: h + torch.rand_like(h), lambda h: h[torch.randperm(3)], lambda h: h * torch.bernoulli(h)]
)
def test_a_random_number_in_the_spine_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(TracingError, match=r"torch\.(rand|bern)\w* is used outside the transformer layers"):
        _trace(PreparedModel(function))


@pytest.mark.parametrize("tracer", ["hf", "torch"])
def test_random_functions_under_other_names(tracer: str) -> None:
    for function in (lambda h: h * rand(1), lambda h: h + other_names.draw()):
        model = PreparedModel(function)
        with pytest.raises(TracingError, match=r"torch\.randn? is used outside the transformer layers"):
            trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))


def _forked(hidden: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return hidden * 2


SEEDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "manual_seed": lambda h: torch.manual_seed(0),
    "seed under a name of its own": lambda h: new_seed(),
    "manual_seed of CUDA": lambda h: torch.cuda.manual_seed(0),
    "set_rng_state by fork_rng": _forked,
}


@pytest.mark.parametrize("name", SEEDS)
def test_the_state_of_the_generators_is_not_set(name: str) -> None:
    def prepare(hidden: torch.Tensor) -> torch.Tensor:
        SEEDS[name](hidden)
        return hidden

    model = PreparedModel(prepare)
    before = torch.get_rng_state()
    with pytest.raises(TracingError, match=rf"torch.(cuda.)?{name.split()[0]} is used outside .* would have no effect"):
        _trace(model)
    assert torch.equal(torch.get_rng_state(), before)


DRAWS: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "random.uniform": lambda: uniform(0, 1),
    "numpy.random.rand": lambda: float(numpy.random.rand()),
}


class Skipping(PlainModel):
    """Skips its layers at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if self.draw() < 0.5 else hidden


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_number_is_refused(name: str) -> None:
    model = Skipping(DRAWS[name])
    with pytest.raises(TracingError, match=rf"{name} is used outside .*\n  at .*test_constructors.py:\d+"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
    DRAWS[name]()  # allowed again
