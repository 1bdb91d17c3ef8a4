"""Tensors outside the layers are made in each step; random tensors and numbers are refused."""

import random
import threading
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

from nxdpp.tracing.graph.constructors import refused_random_numbers
from nxdpp.tracing.graph.errors import TracingError
from tests.support import other_names
from tests.support.traced_models import PlainLayer, PlainModel, PreparedModel, options_for, run_graph, trace_with

# A global that is a method of an object without a truth.
first_item = numpy.ones(2).item


CONSTRUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arange": lambda h: h + torch.arange(h.shape[0], device=h.device).unsqueeze(1),
    "zeros": lambda h: h + torch.zeros(h.size(0), 4, dtype=h.dtype),
    "ones": lambda h: h + torch.ones(h.shape[0], 1),
    "full": lambda h: h + torch.full((h.shape[0], 4), 3.0),
    "tensor": lambda h: h + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "eye": lambda h: h @ torch.eye(h.shape[-1]),
    "linspace": lambda h: h + torch.linspace(0, 1, h.shape[-1]),
    "finfo": lambda h: h.clamp(min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).eps),
    "finfo of a known type": lambda h: h.clamp(max=torch.finfo(torch.float32).eps),
    "tril of ones": lambda h: torch.tril(torch.ones(h.shape[0], h.shape[0])) @ h,
    "zeros_like": lambda h: h + torch.ones_like(h) - torch.zeros_like(h),
    "new_zeros": lambda h: h + h.new_ones(h.shape[0], 4),
}


def _trace(model: nn.Module):  # type: ignore[no-untyped-def]
    return trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))


@pytest.mark.parametrize("function", CONSTRUCTIONS.values(), ids=CONSTRUCTIONS.keys())
def test_a_tensor_made_in_the_spine_follows_the_size_of_the_batch(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = PreparedModel(function)
    traced = _trace(model)

    for rows in (2, 7):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(run_graph(model, traced, {"x": x}), model(x))


JOINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cat": lambda h: torch.cat(h.split(2, dim=-1), dim=-1) + torch.cat(tensors=h.split(2, dim=-1), dim=-1),
    "cat under a name of its own": lambda h: joined(h.split(2, dim=-1), -1),
    "stack": lambda h: torch.stack(h.unbind(-1), dim=-1),
    "hstack": lambda h: torch.hstack(h.split(2, dim=-1)),
}


@pytest.mark.parametrize("function", JOINED.values(), ids=JOINED.keys())
def test_a_sequence_that_is_one_traced_value_is_joined(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    test_a_tensor_made_in_the_spine_follows_the_size_of_the_batch(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h + torch.rand(4),
        lambda h: h + torch.randn(h.shape[0], 4),
        lambda h: h + torch.rand_like(h),
        lambda h: h[torch.randperm(3)],
        lambda h: h * torch.bernoulli(h),
    ],
    ids=["rand", "randn", "rand_like", "randperm", "bernoulli"],
)
def test_a_random_number_in_the_spine_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(TracingError, match=r"torch\.(rand|bern)\w* is used outside the transformer layers"):
        _trace(PreparedModel(function))


def _by_helper(hidden: torch.Tensor) -> torch.Tensor:
    return other_names.positions(hidden)


OTHER_NAMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arange": lambda h: h + arange(h.shape[0]).unsqueeze(1),
    "zeros under a name of its own": lambda h: h + nothing(h.size(0), 4, dtype=h.dtype),
    "finfo": lambda h: h.clamp(max=finfo(h.dtype).eps),
    "is_tensor": lambda h: h * 2 if is_tensor(h) else h,
    "a function of another file": _by_helper,
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_constructors_under_other_names(name: str) -> None:
    test_a_tensor_made_in_the_spine_follows_the_size_of_the_batch(OTHER_NAMES[name])


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
    "manual_seed of torch.random": lambda h: torch.random.manual_seed(0),
    "seed under a name of its own": lambda h: new_seed(),
    "set_rng_state": lambda h: torch.set_rng_state(torch.get_rng_state()),
    "manual_seed of CUDA": lambda h: torch.cuda.manual_seed(0),
    "set_rng_state by fork_rng": _forked,
}


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize("name", SEEDS)
def test_the_state_of_the_generators_is_not_set(name: str, tracer: str) -> None:
    def prepare(hidden: torch.Tensor) -> torch.Tensor:
        SEEDS[name](hidden)
        return hidden

    model = PreparedModel(prepare)
    before = torch.get_rng_state()
    with pytest.raises(TracingError, match=rf"torch.(cuda.)?{name.split()[0]} is used outside .* would have no effect"):
        trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))
    assert torch.equal(torch.get_rng_state(), before)


def test_constructors_are_torchs_own_afterwards() -> None:
    before = dict(vars(torch))

    _trace(PreparedModel(CONSTRUCTIONS["arange"]))
    with pytest.raises(TracingError):
        _trace(PreparedModel(lambda h: h + torch.rand(4)))

    assert {name for name in before if vars(torch)[name] is not before[name]} == set()


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), lambda: torch.randn(4)], ids=["number", "tensor"])
def test_random_tensors_that_plain_fx_would_draw_once_are_refused(draw: Callable[[], Any]) -> None:
    model = PreparedModel(lambda hidden: hidden * draw())
    with pytest.raises(TracingError, match=r"torch.randn? is used outside .*\n  at .*test_constructors.py:\d+"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer, tracer_cls="torch"))


def test_plain_fx_draws_random_tensors_like_a_traced_value_in_each_step() -> None:
    model = PreparedModel(torch.rand_like)
    traced = trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer, tracer_cls="torch"))
    x = torch.ones(2, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        assert torch.equal(run_graph(model, traced, {"x": x}), expected)


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


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_random_number_is_refused(name: str, tracer: str) -> None:
    model = Skipping(DRAWS[name])
    with pytest.raises(TracingError, match=rf"{name} is used outside .*\n  at .*test_constructors.py:\d+"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))
    DRAWS[name]()  # allowed again


def test_other_threads_draw_meanwhile() -> None:
    drawn: list[float] = []
    with refused_random_numbers(PlainModel()):
        thread = threading.Thread(target=lambda: drawn.append(random.random()))
        thread.start()
        thread.join()
    assert len(drawn) == 1


def test_transformers_may_ask_whether_to_drop_a_layer() -> None:
    drawn: dict[str, Any] = {"__name__": "transformers.models.musicgen.modeling_musicgen", "random": random}
    with refused_random_numbers(PlainModel()):
        exec("number = random.uniform(0, 1)", drawn)
    assert 0 <= drawn["number"] <= 1
