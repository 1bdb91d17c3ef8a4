"""Tensor x pipeline x data parallelism with and without sequence parallelism: the training of one process."""

import sys
from pathlib import Path

import pytest
import torch

from tests.pipeline.whole.three_dimensions import Case, Training, check, initial_state, train_whole
from tests.support.run_ranks import run_ranks

EXAMPLES = str(Path(__file__).parents[3] / "examples" / "nxd")
SIZES = ((2, 2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1))
"""Ranks: tensor, pipeline, data."""
SCHEDULES = ("1f1b", "zb-v")
WAYS = {
    "one": ((True, "zb-v"),),
    "all": tuple((sequence, schedule) for sequence in (False, True) for schedule in SCHEDULES),
}
"""Sequence parallelism and schedule."""


def _check_all(rank: int, cases: list[Case], state: dict[str, torch.Tensor], whole: Training) -> None:
    sys.path.insert(0, EXAMPLES)
    for case in cases:
        check(case, state, whole)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_schedule_equals_one_process(sizes: tuple[int, int, int], ways: str) -> None:
    _run([Case(*sizes, sequence, schedule) for sequence, schedule in WAYS[ways]])


def test_the_model_of_transformers_equals_one_process() -> None:
    _run([Case(2, 2, 1, True, schedule, unmodified=True) for schedule in SCHEDULES])


def _run(cases: list[Case]) -> None:
    state = initial_state()
    ranks = cases[0].tensor * cases[0].pipeline * cases[0].data
    # Most of the time the ranks wait for each other: the limit is for a loaded machine.
    run_ranks(ranks, _check_all, cases, state, train_whole(state), timeout=200.0)
