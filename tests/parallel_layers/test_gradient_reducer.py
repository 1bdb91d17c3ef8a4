"""Gradients that are reduced once for each step, and not again or in part."""

import pytest
import torch
from torch import nn

from nxdpp.parallel_layers import GradientReducer, parallel_state
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python


def made(rank: int) -> tuple[nn.Linear, GradientReducer]:
    model = nn.Linear(2, 1, bias=True)
    groups = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_control_group()
    return model, GradientReducer([*model.parameters(), model.bias], *groups, mean=False)


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((1, 2), rank + 1.0)).sum().backward()


def once(rank: int) -> None:
    model, reducer = made(rank)
    assert not reducer.is_reduced
    backward(model, rank)
    backward(model, rank)
    for _ in range(2):
        reducer.reduce()
        assert reducer.is_reduced
        assert torch.equal(model.weight.grad, torch.full((1, 2), 6.0))  # type: ignore[arg-type]  # it has one
    # A program may change the sums.
    model.weight.grad.mul_(2)  # type: ignore[union-attr]  # it has one
    reducer.reduce()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 12.0))  # type: ignore[arg-type]  # it has one
    with pytest.raises(RuntimeError, match=r"a backward adds to the gradient of a parameter of shape \[1\], which was"):
        backward(model, rank)


def new_gradients(rank: int) -> None:
    model, reducer = made(rank)
    backward(model, rank)
    reducer.reduce()
    model.zero_grad()
    backward(model, rank)
    reducer.reduce()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))  # type: ignore[arg-type]  # it has one
    reducer.forget()
    assert not reducer.is_reduced
    backward(model, rank)
    # Gradients on one replica alone: each decides as the other does.
    model.zero_grad()
    reducer.reduce()
    if rank == 0:
        backward(model, rank)
    reducer.reduce()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 1.0))  # type: ignore[arg-type]  # it has one


def in_part(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    model, reducer = made(rank)
    backward(model, rank)
    reducer.reduce()
    if rank == 1:
        model.zero_grad()
        backward(model, rank)
    reducer.reduce()


def cases(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    once(rank)
    new_gradients(rank)


def test_gradients_are_reduced_once() -> None:
    run_ranks(2, cases)


def test_new_gradients_on_one_replica_beside_reduced_ones_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"others are new, on this replica or another\. Call zero_grad\(\)"):
        run_ranks(2, in_part)
