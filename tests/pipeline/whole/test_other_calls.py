"""Ranks that wait in different collective calls are told apart within seconds."""

from pathlib import Path

import pytest

from tests.pipeline.whole.test_failures import run_failing

CASES = {
    "save": tuple(
        f"rank 0 is in save_pretrained, rank {rank} in run_train step 3: each waits for the other" for rank in (1, 2, 3)
    ),
    "evaluate_a_replica": (
        "in run_eval step 1 (number of items of an evaluation), and data-parallel rank 1 (rank 1) in run_train step 3",
        "in run_eval step 1 (number of items of an evaluation), and data-parallel rank 1 (rank 3) in run_train step 3",
    ),
    "models": ("pipeline rank 0 (rank 0): number of the wrapped model: 2", "(rank 1): number of the wrapped model: 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_different_calls_end_with_both_calls(case: str, tmp_path: Path) -> None:
    ended = run_failing("other_call_program.py", [case, str(tmp_path / "saved")], ranks=4)
    assert any(words in ended.output for words in CASES[case]), ended.output
