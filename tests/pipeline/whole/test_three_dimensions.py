"""Tensor x pipeline x data parallelism with and without sequence parallelism: the training of one process."""

import sys
from pathlib import Path

import torch

from tests.pipeline.whole.three_dimensions import Case, Training, check, initial_state, train_whole
from tests.support.run_ranks import run_ranks

EXAMPLES = str(Path(__file__).parents[3] / "examples" / "nxd")
SCHEDULES = ("1f1b", "zb-v")


def _check_all(rank: int, cases: list[Case], state: dict[str, torch.Tensor], whole: Training) -> None:
    sys.path.insert(0, EXAMPLES)
    for case in cases:
        check(case, state, whole)


def _compare(*sizes: tuple[int, int, int]) -> None:
    state = initial_state()
    cases = [Case(*size, sequence, schedule) for size in sizes for sequence in (False, True) for schedule in SCHEDULES]
    world = cases[0].tensor * cases[0].pipeline * cases[0].data
    run_ranks(world, _check_all, cases, state, train_whole(state), timeout=200.0)


def test_two_dimensions_over_four_ranks_equal_one_process() -> None:
    _compare((1, 2, 2), (2, 2, 1), (2, 1, 2))


def test_three_dimensions_over_eight_ranks_equal_one_process() -> None:
    _compare((2, 2, 2))
