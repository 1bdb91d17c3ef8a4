"""An error that starts on one rank: its traceback is the only one, and the last line of all other ranks names it."""

from pathlib import Path

import pytest

from tests.support.run_program import run_program

PROGRAM = str(Path(__file__).with_name("erring_program.py"))


@pytest.mark.parametrize(
    ("case", "rank"), [("save", 0), ("load", 1), ("finish of a save", 0), ("evaluation", 1), ("construction", 1)]
)
def test_all_ranks_name_the_rank_on_which_an_error_starts(tmp_path: Path, case: str, rank: int) -> None:
    ended = run_program(PROGRAM, [case, str(rank), str(tmp_path)], 2, own_outputs=True)
    assert ended.codes == [1, 1], ended.output
    assert "KeyError: 'the first error'\n" in ended.outputs[rank], ended.output
    line = f"rank {1 - rank} stops because rank {rank} failed with KeyError: see the traceback of rank {rank}\n"
    assert ended.outputs[1 - rank].endswith(line), ended.output
    assert ended.output.count("Traceback (most recent call last)") == 1


def test_an_error_in_forward_shows_the_line_of_the_model(tmp_path: Path) -> None:
    ended = run_program(PROGRAM, ["viewed in training", "1", str(tmp_path)], 2, own_outputs=True)
    assert ended.codes == [1, 1], ended.output
    lines = Path(PROGRAM).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if "targets.view(-1)" in line)
    assert f"in the model: {PROGRAM}:{number}, in forward: {lines[number - 1].strip()}\n" in ended.outputs[1]
    assert "in the pipeline: stage 1, forward of microbatch 0" in ended.outputs[1]
    assert "model.run_train(" in ended.outputs[1]
    assert "in main\n" in ended.outputs[1]
    assert ended.outputs[0].endswith("rank 1 failed with RuntimeError: see the traceback of rank 1\n")
