"""A rank that fails in a step ends all ranks, and says on which stage, in which action, on which microbatch."""

import re
from pathlib import Path

import pytest

from tests.support.run_program import run_program

PROGRAM = str(Path(__file__).with_name("failing_program.py"))
LAST_WORDS = {
    "forward": "in the pipeline: stage 1, forward of microbatch 1 (action 1F1)",
    "backward": "in the pipeline: stage 1, backward of microbatch 1 (action 1B1)",
    "input": "ValueError: a batch of 6 (input_ids, attention_mask, labels) does not divide into num_microbatches=4.",
}


@pytest.mark.parametrize("where", ["forward", "backward", "input"])
def test_the_first_error_is_the_last_line(where: str) -> None:
    ended = run_program(PROGRAM, [where], ranks=4, timeout=120)
    assert ended.codes == [1] * 4, ended.output
    failed = re.search(r"fails at (\S+)", ended.output)
    assert failed, ended.output
    assert ended.time - float(failed[1]) < 10, ended.output
    lines = [line for line in ended.output.strip().splitlines() if not re.match(r"[WE]\d{4} ", line)]
    assert LAST_WORDS[where] in lines[-1], ended.output
    if where != "input":
        assert any("ArithmeticError: the layer broke" in line for line in lines[-3:]), ended.output
