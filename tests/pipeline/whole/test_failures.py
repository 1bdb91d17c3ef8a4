"""A rank that fails in a step ends all ranks, with a note of the stage, action and microbatch."""

import re
from pathlib import Path

import pytest

from tests.support.run_program import Ended, run_program

FOLDER = Path(__file__).parent
LAST_WORDS = {
    "forward": "in the pipeline: stage 1, forward of microbatch 1 (action 1F1)",
    "backward": "in the pipeline: stage 1, backward of microbatch 1 (action 1B1)",
    "input": "ValueError: a batch of 6 (input_ids, attention_mask, labels) does not divide into num_microbatches=4.",
}


def run_failing(program: str, arguments: list[str], ranks: int) -> Ended:
    """Run a program that must fail; all its ranks end within 10 s of the first failure."""
    ended = run_program(str(FOLDER / program), arguments, ranks=ranks)
    failed = re.search(r"fails at (\S+)", ended.output)
    assert failed, ended.output
    assert all(ended.codes), ended.output
    assert ended.time - float(failed[1]) < 10, ended.output
    return ended


@pytest.mark.parametrize("where", ["forward", "backward", "input"])
def test_the_first_error_is_the_last_line(where: str) -> None:
    ended = run_failing("failing_program.py", [where], ranks=4)
    assert ended.codes == [1] * 4, ended.output
    lines = [line for line in ended.output.strip().splitlines() if not re.match(r"[WE]\d{4} ", line)]
    assert LAST_WORDS[where] in lines[-1], ended.output
    if where != "input":
        assert any("ArithmeticError: the layer broke" in line for line in lines[-4:]), ended.output


@pytest.mark.parametrize(
    ("schedule", "where", "words"),
    [
        ("interleaved", "backward", "stage 3, backward of microbatch 1 (action 3B1)"),
        ("zb-v", "backward", "stage 2, input gradient of microbatch 1 (action 2I1)"),
    ],
)
def test_a_failure_names_the_stage_of_the_rank(schedule: str, where: str, words: str) -> None:
    ended = run_failing("failing_stage.py", [schedule, where], ranks=2)
    assert f"in the pipeline: {words}" in ended.output, ended.output
    assert "ArithmeticError: the layer broke" in ended.output, ended.output
