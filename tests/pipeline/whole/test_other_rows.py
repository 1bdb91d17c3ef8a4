"""Ranks whose rows differ are told of the generators that may have moved on one of them."""

import pytest
import torch

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
