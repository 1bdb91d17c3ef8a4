"""Random numbers under tensor parallelism."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nxdpp import parallel_state
from nxdpp.tensor.random import get_xla_rng_tracker, model_parallel_xla_manual_seed


@pytest.fixture(autouse=True)
def debug_mode() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    get_xla_rng_tracker().reset()


def drawn(rank: int) -> list[list[float]]:
    """Numbers of tensor rank ``rank`` of 2: outside, in two forks with one outside between them, and outside."""
    parallel_state.initialize_debug(tensor_model_parallel_rank=rank, tensor_model_parallel_size=2)
    model_parallel_xla_manual_seed(7)
    numbers = [torch.rand(3).tolist()]
    for _ in range(2):
        with get_xla_rng_tracker().fork():
            numbers.append(torch.rand(3).tolist())
        numbers.append(torch.rand(3).tolist())
    parallel_state.destroy_model_parallel()
    return numbers


def test_tensor_ranks_draw_alike_outside_a_fork_and_differently_inside() -> None:
    first, second = drawn(0), drawn(1)

    assert first[::2] == second[::2]
    assert len({tuple(numbers) for numbers in first[::2]}) == 3
    assert len({tuple(numbers) for numbers in (*first[1::2], *second[1::2])}) == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_layer_draws_again_what_it_drew(use_reentrant: bool) -> None:
    parallel_state.initialize_model_parallel()
    model_parallel_xla_manual_seed(7)
    masks = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with get_xla_rng_tracker().fork():
                hidden = functional.dropout(hidden, 0.5)
                masks.append(hidden.detach() != 0)
        return hidden * hidden

    hidden = torch.ones(64, requires_grad=True)
    output = checkpoint(layer, hidden, use_reentrant=use_reentrant)
    torch.rand(3)
    output.sum().backward()
    first, second, *again = masks
    assert not first.equal(second)
    assert all(map(torch.equal, [first, second], again))
