"""A program that catches the error of a step does not go on: no rank takes another step for the failed one."""

import re

import pytest

from nxdpp import NxDPPModel
from tests.pipeline.whole.test_failures import FOLDER, run_failing
from tests.support.models import make, padded_batch
from tests.support.run_program import run_program

REFUSED = "run_train step 2 raised ValueError: a batch of 6 (x) does not divide"


@pytest.mark.parametrize(
    ("where", "failing", "words"),
    [
        ("layer", 1, "ArithmeticError: the layer broke"),
        ("inputs", 0, f"pipeline rank 0 (rank 0): {REFUSED}"),
    ],
)
def test_no_rank_goes_on_after_a_caught_failure(where: str, failing: int, words: str) -> None:
    ended = run_failing("caught_program.py", [where, str(failing)], ranks=2)
    # Steps before the failing one have run on all ranks, and no rank ran a later one.
    assert {int(step) for step in re.findall(r"has run step (\d)", ended.output)} <= {1, 2}
    assert ended.output.count("has run step 1") == 2
    # The last words are those of the first failure.
    assert words in ended.output[ended.output.rindex("Traceback") :], ended.output
    caught = re.findall(r"rank 1 caught in step (\d): (.*)", ended.output)
    assert [int(step) for step, _ in caught] == [2, 3, 4, 5]
    assert all("has failed on this rank, and its error was caught" in text for step, text in caught if int(step) > 3)
    assert "rank 1 is done" in ended.output


def test_a_rank_that_refuses_a_batch_and_ends_is_named() -> None:
    program = str(FOLDER / "caught_program.py")
    # The first rank has the store, which is gone with it.
    ended = run_program(program, ["leaves", "0"], ranks=2, first_rank_has_store=True)
    assert ended.codes[1] == 1, ended.output
    words = "rank 0 ended after run_train step 2, and rank 1 is in run_train step 2"
    assert words in ended.output.strip().splitlines()[-1], ended.output


def test_a_rank_does_not_start_again_after_a_failure() -> None:
    ended = run_failing("caught_program.py", ["restart", "1"], ranks=2)
    assert "rank 0 stops because rank 1 failed" in ended.output, ended.output
    assert "RuntimeError: run_train step 2 has failed on this rank, and its error was caught" in ended.output
    assert ended.codes == [1, 1], ended.output


@pytest.mark.cpu_only("an index outside of a table is an error of a later call, after which a device may be unusable")
@pytest.mark.usefixtures("one_rank")
def test_one_process_may_go_on() -> None:
    """One rank without others may go on after an error in a step: its engines begin anew."""
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=4)
    batch = padded_batch(8)
    expected = wrapped.run_train(**batch)
    batch["input_ids"][7, 0] = 10_000
    with pytest.raises(IndexError):
        wrapped.run_train(**batch)
    assert wrapped.run_train(**padded_batch(8)) == expected
