"""An error in a generation ends all ranks, and is named."""

import re
from pathlib import Path

import pytest

from tests.support.run_program import run_program


@pytest.mark.parametrize(("where", "words"), [("layer", "the layer broke"), ("criterion", "the criterion broke")])
def test_all_ranks_end_with_the_reason(where: str, words: str) -> None:
    ended = run_program(str(Path(__file__).parent / "failing_program.py"), [where], ranks=2, timeout=60)

    failed = re.search(r"fails at (\S+)", ended.output)
    assert failed
    assert ended.codes == [1, 1], ended.output
    assert ended.time - float(failed[1]) < 10
    assert words in ended.output
    if where == "layer":
        assert "rank 1 stops because rank 0 failed" in ended.output
        assert "in generate: model.layers.1 on pipeline rank 0" in ended.output
