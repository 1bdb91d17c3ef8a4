"""One of 4 ranks has a fault: all ranks end soon, and each names the faulty one in its last line.

``benchmarks/faults.py`` measures the times. The bounds here are for a machine with other work.
"""

import re

import pytest

from tests.support import fake_device, faulty_program
from tests.support.run_program import Ended, run_program

RANKS = 4
BOUND_SECONDS = 15.0
HANG_TIMEOUT = 2.0


def _run(
    fault: str, rank: int, first_rank_has_store: bool = True, hang_timeout: float = HANG_TIMEOUT, *more: str
) -> Ended:
    program = str(faulty_program.__file__)
    arguments = [fault, str(rank), str(hang_timeout), *more]
    return run_program(program, arguments, RANKS, first_rank_has_store=first_rank_has_store, own_outputs=True)


def _seconds(ended: Ended) -> float:
    """Return the time from the fault, at the latest, to the end of the last rank."""
    times = [float(time) for time in re.findall(r"^fault at (\S+)", ended.output, re.M)]
    assert times, ended.output
    return ended.time - max(times)


def _last_lines(ended: Ended) -> dict[int, str]:
    """Return the reason in the last line of each rank that stops. Lines of torch's own log do not count."""
    found = {}
    for rank, output in enumerate(ended.outputs):
        lines = [line for line in output.strip().splitlines() if not re.match(r"\[?[WE]\d{4} ", line)]
        stops = re.match(rf"rank {rank} stops because (.*)", lines[-1]) if lines else None
        if stops is not None:
            found[rank] = stops[1]
    return found


@pytest.mark.parametrize(
    ("fault", "rank", "first_has_store", "text"),
    [
        ("SIGKILL", 0, True, "rank 0 died"),
        ("SIGKILL between steps", 1, False, "rank 1 died"),
        ("sys.exit in a layer", 2, True, "rank 2 ended its program within run_train step 3"),
        ("sys.exit(0) before a barrier", 2, False, "rank 2 ended after run_train step 3, and rank"),
        ("exception before an exchange", 0, True, "rank 0 failed with ValueError: see the traceback of rank 0"),
    ],
)
def test_ranks_that_survive_name_the_one_that_is_gone(fault: str, rank: int, first_has_store: bool, text: str) -> None:
    ended = _run(fault, rank, first_has_store)
    codes = [code for number, code in enumerate(ended.codes) if number != rank]
    assert codes == [1] * (RANKS - 1), ended.output
    assert _seconds(ended) < BOUND_SECONDS, ended.output
    lines = _last_lines(ended)
    assert sorted(lines) == [number for number in range(RANKS) if number != rank], ended.output
    assert all(line.startswith(text) for line in lines.values()), ended.output
    if text == "rank 0 died":
        # Torch prints a trace for each request of a lost store: at most for the one that was under way.
        assert all(output.count("Exception raised from") <= 1 for output in ended.outputs), ended.output


def test_a_rank_with_a_step_more_names_those_that_have_ended() -> None:
    ended = _run("one step more", 2, first_rank_has_store=False)
    assert ended.codes == [0, 0, 1, 0], ended.output
    assert _seconds(ended) < BOUND_SECONDS, ended.output
    (line,) = _last_lines(ended).values()
    assert re.match(r"ranks? 0.* ended after run_train step 6, and rank 2 is in run_train step 7", line), line


def test_a_rank_that_hangs_is_shown_and_named() -> None:
    rank = 2
    ended = _run("loop", rank)
    assert ended.codes == [1] * RANKS, ended.output
    assert HANG_TIMEOUT < _seconds(ended) < HANG_TIMEOUT + BOUND_SECONDS, ended.output
    lines = _last_lines(ended)
    assert sorted(lines) == list(range(RANKS)), ended.output
    others = [number for number in range(RANKS) if number != rank]
    named = rf"rank {rank} hangs: run_train step 3, stage {rank}, forward of microbatch 0, for \d+ s, in "
    named += r"`loop_in_a_layer`, faulty_program\.py:\d+; ranks 0, 1 and 3 wait for it"
    assert all(re.match(named, line) for line in lines.values()), ended.output
    for number in others:
        assert re.search(rf"^  rank {number}: run_train step 3, stage {number}, .* waits for", ended.output, re.M)
    assert re.search(rf"stack of rank {rank}.*Layer.forward\n +.* in loop_in_a_layer$", ended.output, re.M | re.S)


def test_a_rank_that_dies_in_a_gather_is_named() -> None:
    ended = _run("SIGKILL in a gather", 2, True, HANG_TIMEOUT, "shards")
    assert [code for rank, code in enumerate(ended.codes) if rank != 2] == [1] * (RANKS - 1), ended.output
    assert _seconds(ended) < BOUND_SECONDS, ended.output
    assert {rank: line[:11] for rank, line in _last_lines(ended).items()} == dict.fromkeys((0, 1, 3), "rank 2 died")


def test_a_rank_that_hangs_before_a_gather_is_named() -> None:
    ended = _run("loop", 2, True, HANG_TIMEOUT, "shards")
    assert ended.codes == [1] * RANKS, ended.output
    assert HANG_TIMEOUT < _seconds(ended) < HANG_TIMEOUT + BOUND_SECONDS, ended.output
    lines = _last_lines(ended)
    assert sorted(lines) == list(range(RANKS)), ended.output
    named = r"rank 2 hangs: run_train step 3, stage 1, forward of microbatch 0, for \d+ s, in `loop_in_a_layer`"
    assert all(re.match(named, line) for line in lines.values()), ended.output
    gathers = r"^  rank 3: run_train step 3, stage 1, .* waits for \d+ s in the gather of parameters, with rank 2"
    assert re.search(gathers, ended.output, re.M), ended.output


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("SIGKILL among tokens", "rank 2 died"),
        ("exception among tokens", "rank 2 failed with ValueError: see the traceback of rank 2"),
        (
            "loop among tokens",
            r"rank 2 hangs: run_train step 3, stage 1, forward of microbatch 0, for \d+ s, in `loop_in",
        ),
    ],
)
def test_a_rank_with_a_fault_while_tokens_are_on_their_way_is_named(fault: str, text: str) -> None:
    ended = _run(fault, 2, True, HANG_TIMEOUT, "experts")
    assert [code for rank, code in enumerate(ended.codes) if rank != 2] == [1] * (RANKS - 1), ended.output
    assert _seconds(ended) < HANG_TIMEOUT * ("loop" in fault) + BOUND_SECONDS, ended.output
    lines = _last_lines(ended)
    assert all(re.match(text, lines[rank]) for rank in (0, 1, 3)), ended.output


def test_a_stopped_rank_is_named_and_killed() -> None:
    rank = 0
    ended = _run("SIGSTOP", rank)
    assert ended.codes == [-9 if number == rank else 1 for number in range(RANKS)], ended.output
    assert HANG_TIMEOUT < _seconds(ended) < HANG_TIMEOUT + BOUND_SECONDS, ended.output
    lines = _last_lines(ended)
    assert sorted(lines) == [number for number in range(RANKS) if number != rank], ended.output
    assert all(re.match(rf"rank {rank}\b.* stopped", line) for line in lines.values()), ended.output


def test_a_rank_that_is_in_no_call_is_no_hang() -> None:
    ended = _run("evaluates alone", 2, hang_timeout=1.0)
    assert ended.codes == [0] * RANKS, ended.output
    waiting = "rank 2 is outside of nxdpp, after run_train step 3, for .* ranks 0, 1 and 3 wait for it. The job goes on"
    assert re.search(waiting, ended.output), ended.output


def test_a_rank_that_is_slow_but_moves_is_no_hang() -> None:
    ended = _run("slow", 2, hang_timeout=1.0)
    assert ended.codes == [0] * RANKS, ended.output
    assert "hangs" not in ended.output
    assert "has not moved" not in ended.output


REASON = fake_device.why_not()
ON_A_DEVICE = {
    "exception in a backward": "rank 2 failed with ValueError",
    "SIGKILL": "rank 2 died",
    "loop": "rank 2 hangs: run_train step 3, stage 2, forward of microbatch 0, .* wait for it",
    "skips an asynchronous collective": r"all ranks wait .* rank 0 in .* run_train step 4, waits for \d+ s in work of "
    "its program on the device, before run_train step 4; rank 2 passed it. Let all ranks make the program.s",
}
"""The reason that the other ranks name; their hosts go on while their devices wait, and stand in ``loss.item()``."""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("fault", ON_A_DEVICE)
def test_a_fault_is_named_where_waits_stop_streams(fault: str) -> None:
    fake_device.built()
    ended = _run(fault, 2, True, HANG_TIMEOUT, "fake")
    lines = _last_lines(ended)
    hangs = any(word in fault for word in ("SIGSTOP", "loop", "barrier", "skips"))
    assert lines.keys() >= {0, 1, 3}, ended.output
    assert all(re.match(ON_A_DEVICE[fault], lines[rank]) for rank in (0, 1, 3)), ended.output
    assert _seconds(ended) < HANG_TIMEOUT * hangs + BOUND_SECONDS, ended.output
    if "loop" in fault:
        # At least one of them is outside of a step.
        assert re.search(r"outside of nxdpp, after run_train step 3, waits for \d+ s in the ", ended.output), (
            ended.output
        )
