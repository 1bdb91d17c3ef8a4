"""One of 2 XLA ranks has a fault: both end soon, and each names the faulty one. A compilation is no hang."""

import re

from tests.support import faulty_program
from tests.support.run_program import Ended, run_program

RANKS = 2
# Ranks stop within seven seconds; the rest is for a machine with other work.
BOUND_SECONDS = 20.0


def _run(fault: str, rank: int, hang_timeout: float = 0.0) -> Ended:
    arguments = [fault, str(rank), str(hang_timeout), "xla"]
    return run_program(str(faulty_program.__file__), arguments, RANKS, timeout=150.0, own_outputs=True)


def _check_end(ended: Ended, line: str, after: float = 0.0) -> None:
    (fault,) = re.findall(r"^fault at (\S+)", ended.output, re.M)
    assert after <= ended.time - float(fault) < after + BOUND_SECONDS, ended.output
    assert re.search(line, ended.output), ended.output


def test_an_error_in_a_forward_ends_both_ranks() -> None:
    ended = _run("exception", 1)
    assert ended.codes == [1, 1], ended.output
    _check_end(ended, "rank 0 stops because rank 1 failed")
    assert "ValueError: the first error" in ended.outputs[1]
    assert "in the pipeline: stage 1, forward of microbatch 0" in ended.outputs[1]


def test_a_rank_that_is_killed_in_a_compilation_is_named() -> None:
    ended = _run("SIGKILL in a compilation", 1)
    assert ended.codes == [1, -9], ended.output
    _check_end(ended, "rank 0 stops because rank 1 died")


def test_a_rank_that_hangs_is_named() -> None:
    ended = _run("sleep", 1, hang_timeout=2.0)
    assert ended.codes == [1, 1], ended.output
    _check_end(ended, r"rank 0 stops because rank 1 hangs: run_train step 3, stage 1, forward of microbatch 0", 2.0)


def test_a_compilation_longer_than_the_limit_is_no_hang_and_is_named() -> None:
    ended = _run("compiles long", 1, hang_timeout=1.0)
    assert ended.codes == [0, 0], ended.output
    (seconds,) = re.findall(r"^rank 1 compiled for (\S+) s", ended.output, re.M)
    assert float(seconds) > 2.0, ended.output
    named = r"rank 1 compiles: run_train step 3, stage 1, submit of microbatch \d, for \d+ s; rank 0 waits for it\."
    assert re.search(named, ended.output), ended.output
