"""A rank that fails in a step ends all ranks, with a note of the stage, action and microbatch."""

import re
from pathlib import Path

import pytest

from tests.support.run_program import Ended, run_program

FOLDER = Path(__file__).parent


def run_failing(program: str, arguments: list[str], ranks: int) -> Ended:
    """Run a program that must fail; all its ranks end within 10 s of the first failure."""
    ended = run_program(str(FOLDER / program), arguments, ranks=ranks)
    failed = re.search(r"fails at (\S+)", ended.output)
    assert failed, ended.output
    assert all(ended.codes), ended.output
    assert ended.time - float(failed[1]) < 10, ended.output
    return ended


@pytest.mark.parametrize(
    ("ranks", "schedule", "where", "words"),
    [
        (4, "1f1b", "forward", "in the pipeline: stage 1, forward of microbatch 1 (action 1F1)"),
        (2, "zb-v", "backward", "in the pipeline: stage 2, input gradient of microbatch 1 (action 2I1)"),
        (2, "1f1b", "input", "ValueError: a batch of 6 (x) does not divide into num_microbatches=4."),
    ],
)
def test_the_first_error_is_the_last_line(ranks: int, schedule: str, where: str, words: str) -> None:
    ended = run_failing("failing_program.py", [str(ranks), schedule, where], ranks=ranks)
    assert ended.codes == [1] * ranks, ended.output
    lines = [line for line in ended.output.strip().splitlines() if not re.match(r"[WE]\d{4} ", line)]
    assert words in lines[-1], ended.output
    if where != "input":
        assert any("ArithmeticError: the layer broke" in line for line in lines[-4:]), ended.output
