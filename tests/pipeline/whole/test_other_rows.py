"""Ranks whose rows differ are told of the generators that may have moved on one of them."""

import numpy
import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.whole.test_random_numbers import wrapped
from tests.support.run_ranks import run_ranks


def moved(rank: int, stages: int, mover: int, step: int) -> None:
    """Steps on drawn rows, before one of which one rank alone draws a number more."""
    model = wrapped(stages)
    for number in range(step + 1):
        if rank == mover and number == step:
            torch.rand(1)
        rows = torch.rand(4, 8)
        model.run_train(rows=rows, target=rows)


@pytest.mark.cpu_only("values on a device are compared in the step after")
@pytest.mark.parametrize(
    ("ranks", "mover", "step", "since"),
    [(2, 1, 0, "never alike on "), (4, 2, 3, "alike in step 3 of both ranks. Since then")],
)
def test_a_rank_that_alone_has_drawn_is_told_of_in_the_step_of_other_rows(
    ranks: int, mover: int, step: int, since: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(ranks, moved, ranks, mover, step)
    error, here = str(caught.value), mover
    there = f"pipeline rank {here - 1} (rank {here - 1})"
    assert f"pipeline rank {here} (rank {here}) was given other values of rows, target than {there}" in error
    assert "a draw on some ranks only" in error
    assert f"{since}{'' if step else there}" in error


def drawn_by_one_rank(rank: int) -> None:
    """Steps on the same rows, before the third of which one rank alone draws other ones."""
    model = wrapped(2, draws=False)
    for number in range(3):
        rows = torch.rand(4, 8) if rank == 1 and number == 2 else torch.ones(4, 8)
        model.run_train(rows=rows, target=rows)


@pytest.mark.cpu_only("values on a device are compared in the step after")
def test_the_rank_whose_generator_alone_has_moved_is_named() -> None:
    with pytest.raises(AssertionError, match=r"Since then only pipeline rank 1 \(rank 1\) has drawn from them"):
        run_ranks(2, drawn_by_one_rank)


class ByNumpy(nn.Linear):
    """A layer that drops its output at random, by NumPy."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * float(numpy.random.rand() < 2)


def drawn_by_numpy(rank: int, remedy: bool) -> int:
    """Steps on rows drawn by NumPy, of whose generator the last stage draws."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, hang_timeout=60)
    torch.manual_seed(0)
    numpy.random.seed(0)
    generator = numpy.random.default_rng(0)
    layers = [nn.Sequential(nn.Linear(8, 8)), nn.Sequential(ByNumpy(8, 8))]
    model = NxDPPModel(
        nn.Sequential(*layers), transformer_layer_cls=nn.Sequential, loss_fn=lambda output: output.mean()
    )
    for _ in range(3):
        rows = generator.random((4, 8)) if remedy else numpy.random.random((4, 8))
        model.run_train(input=torch.from_numpy(rows).float())
    return 3


def test_a_layer_that_draws_by_numpy_is_a_cause_of_other_rows() -> None:
    words = r"(?s)other values of input.*numpy, without a seed or where a layer .*numpy\.random\.default_rng\(seed\)"
    with pytest.raises(AssertionError, match=words):
        run_ranks(2, drawn_by_numpy, False)
    assert run_ranks(2, drawn_by_numpy, True) == [3] * 2
