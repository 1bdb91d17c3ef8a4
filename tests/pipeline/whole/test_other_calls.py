"""Ranks that wait in different collective calls are told apart within seconds."""

from pathlib import Path

import pytest

from tests.pipeline.whole.test_failures import run_failing

CASES = {
    "save": tuple(
        f"rank 0 is in save_pretrained, rank {rank} in run_train step 3: each waits for the other" for rank in (1, 2, 3)
    ),
    "save_of_a_replica": (
        "rank 0 is in save_pretrained, rank 1 in run_train step 3: each waits for the other",
        "rank 0 is in save_pretrained, rank 3 in run_train step 3: each waits for the other",
        "rank 2 is in save_pretrained, rank 1 in run_train step 3: each waits for the other",
        "rank 2 is in save_pretrained, rank 3 in run_train step 3: each waits for the other",
        "rank 1 is in run_train step 3, rank 2 in save_pretrained: each waits for the other",
    ),
    "load_pretrained": tuple(
        f"rank 0 is in load_pretrained, rank {rank} in run_train step 3: each waits for the other" for rank in (1, 2, 3)
    ),
    "evaluate": ("rank 1 is in run_eval step 1, rank 3 in run_train step 3", "was given other inputs than"),
    "evaluate_a_replica": (
        "in run_eval step 1 (number of items of an evaluation), and data-parallel rank 1 (rank 1) in run_train step 3",
        "in run_eval step 1 (number of items of an evaluation), and data-parallel rank 1 (rank 3) in run_train step 3",
    ),
    "load": (
        "data-parallel rank 1 (rank 1) has other parameters",
        "data-parallel rank 1 (rank 3) has other parameters",
    ),
    "models": ("pipeline rank 0 (rank 0): number of the wrapped model: 2", "(rank 1): number of the wrapped model: 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_different_calls_end_with_both_calls(case: str, tmp_path: Path) -> None:
    ended = run_failing("other_call_program.py", [case, str(tmp_path / "saved")], ranks=4)
    assert any(words in ended.output for words in CASES[case]), ended.output


def test_replicas_in_different_steps_average_nothing(tmp_path: Path) -> None:
    ended = run_failing("other_call_program.py", ["skip", str(tmp_path)], ranks=4)
    words = "a data-parallel replica is in training step 3, and another in training step 5"
    assert words in ended.output, ended.output
