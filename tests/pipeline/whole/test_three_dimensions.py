"""Tensor x pipeline x data parallelism with and without sequence parallelism: the training of one process."""

import sys
from pathlib import Path

import pytest
import torch

from tests.pipeline.whole.three_dimensions import Case, Training, check, initial_state, train_whole
from tests.support.run_ranks import run_ranks

EXAMPLES = str(Path(__file__).parents[3] / "examples" / "nxd")
# Ranks: tensor, pipeline, data. The newest Python runs the layout in which each group is over two ranks of one stage.
SIZES = [
    (2, 1, 2),
    pytest.param((2, 2, 2), marks=pytest.mark.one_python),
    *(pytest.param(sizes, marks=pytest.mark.sweep) for sizes in ((1, 2, 2), (2, 2, 1))),
]
SCHEDULES = ("1f1b", "zb-v")


def _check_all(rank: int, cases: list[Case], state: dict[str, torch.Tensor], whole: Training) -> None:
    sys.path.insert(0, EXAMPLES)
    for case in cases:
        check(case, state, whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_schedule_equals_one_process(sizes: tuple[int, int, int]) -> None:
    _run([Case(*sizes, sequence, schedule) for sequence in (False, True) for schedule in SCHEDULES])


@pytest.mark.one_python
def test_the_model_of_transformers_equals_one_process() -> None:
    _run([Case(2, 2, 1, True, schedule, unmodified=True) for schedule in SCHEDULES])


def _run(cases: list[Case]) -> None:
    state = initial_state()
    ranks = cases[0].tensor * cases[0].pipeline * cases[0].data
    # Most of the time the ranks wait for each other: the limit is for a loaded machine.
    run_ranks(ranks, _check_all, cases, state, train_whole(state), timeout=200.0)
