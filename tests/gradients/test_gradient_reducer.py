"""Gradients that are reduced once for each step, and not again or in part."""

import pytest
import torch
from torch import nn

from nxdpp.gradients.gradient_reducer import GradientReducer
from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks


def made(rank: int) -> tuple[nn.Linear, GradientReducer]:
    model = nn.Linear(2, 1, bias=True)
    groups = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_control_group()
    return model, GradientReducer([*model.parameters(), model.bias], *groups, mean=False)


def weight_gradient(model: nn.Linear) -> torch.Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


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
        assert torch.equal(weight_gradient(model), torch.full((1, 2), 6.0))
    # A program may change the sums.
    weight_gradient(model).mul_(2)
    reducer.reduce()
    assert torch.equal(weight_gradient(model), torch.full((1, 2), 12.0))
    with pytest.raises(RuntimeError, match=r"a backward adds to the gradient of a parameter of shape \[1\], which was"):
        backward(model, rank)


def new_gradients(rank: int) -> None:
    model, reducer = made(rank)
    backward(model, rank)
    reducer.reduce()
    model.zero_grad()
    backward(model, rank)
    reducer.reduce()
    assert torch.equal(weight_gradient(model), torch.full((1, 2), 3.0))
    reducer.forget()
    assert not reducer.is_reduced
    backward(model, rank)
    # Gradients on one replica alone: each decides as the other does.
    model.zero_grad()
    reducer.reduce()
    if rank == 0:
        backward(model, rank)
    reducer.reduce()
    assert torch.equal(weight_gradient(model), torch.full((1, 2), 1.0))


def after_a_step(rank: int) -> None:
    """The sums stay after a step; a backward that adds to them is found before they are summed again."""
    model, reducer = made(rank)
    reducer.end_step()
    backward(model, rank)
    reducer.reduce()
    reducer.end_step()
    reducer.reduce()
    assert torch.equal(weight_gradient(model), torch.full((1, 2), 3.0))
    model.zero_grad()
    backward(model, rank)
    reducer.reduce()
    assert torch.equal(weight_gradient(model), torch.full((1, 2), 3.0))
    reducer.end_step()
    for create_graph in (False, True):
        model(torch.ones(1, 2)).square().sum().backward(create_graph=create_graph)
        with pytest.raises(RuntimeError, match="a backward adds to the gradient"):
            reducer.reduce()


def replaced(rank: int) -> None:
    """Other tensors in ``.grad`` may be of the sums: they are not summed again. A backward computes new gradients."""
    model, reducer = made(rank)
    backward(model, rank)
    reducer.reduce()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2 if rank else parameter.grad
    with pytest.raises(RuntimeError, match=r"put in the place of gradients after .* on this replica or another"):
        reducer.reduce()
    model.zero_grad()
    backward(model, rank)
    reducer.reduce()
    assert torch.equal(weight_gradient(model), torch.full((1, 2), 3.0))


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
    after_a_step(rank)
    replaced(rank)


def test_gradients_are_reduced_once() -> None:
    run_ranks(2, cases)


def test_new_gradients_on_one_replica_beside_reduced_ones_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"others are new, on this replica or another\. Call zero_grad\(\)"):
        run_ranks(2, in_part)
