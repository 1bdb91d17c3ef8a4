"""A job hangs if each rank waits, works or cannot answer; a rank outside of nxdpp is no cause of an end."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from nxdpp.ranks.faults.board import Board, StreamWaits
from nxdpp.ranks.faults.local_peers import LocalPeers
from nxdpp.ranks.faults.progress import Progress
from nxdpp.ranks.faults.roll_call import Answer, judge, own_answer
from nxdpp.ranks.faults.timeouts import Timeouts

LIMIT = Timeouts(hang=300.0, compile=3600.0)


def _answer(state: Literal["waits", "works", "outside"], seconds: float = 301.0, **changed: Any) -> Answer:
    position = "outside of nxdpp, after run_train step 17" if state == "outside" else "run_train step 18, stage 2"
    values = {
        "is_in_call": state != "outside",
        "where": "`Mlp.forward`, mlp.py:17",
        "stack": ["mlp.py:17 in Mlp.forward"],
    }
    return Answer(
        state=state, position=position, unmoved_seconds=seconds, **{**values, "stopped": [], "running": [], **changed}
    )


class _Events:
    """The stream of a device that has reached the first ``reached`` events."""

    def __init__(self) -> None:
        self.reached = 0
        self._recorded = 0

    def record(self) -> Any:
        number = self._recorded = self._recorded + 1
        return SimpleNamespace(query=lambda: number <= self.reached)


@pytest.mark.parametrize("is_in_step", [True, False], ids=["in the model's code", "in the program"])
def test_a_rank_whose_device_waits_for_a_message_waits(is_in_step: bool) -> None:
    """On NCCL the host goes on, and stops where it reads the device: in a layer, or in ``loss.item()``."""
    board, events = Board(), _Events()
    board.stream_waits = StreamWaits(events.record)
    progress, peers = Progress(board, 20.0), SimpleNamespace(stopped=list, running=list)
    board.stream_waits.add("the P2P transfer, with rank 2")
    board.stream_waits.add("the P2P transfer, with rank 1")
    with board.call("run_train", "step", has_limit=True) if is_in_step else nullcontext():
        for reached, expected in ((0, "with rank 2"), (1, "with rank 1")):
            events.reached = reached
            found = own_answer(board, progress, cast(LocalPeers, peers))
            assert (found.state, found.waits_in) == ("waits", f"the P2P transfer, {expected}")
        waits = replace(found, unmoved_seconds=301.0)
        verdict = judge({0: waits, 1: _answer("works")}, [], 1, LIMIT)
        assert (verdict.hangs, verdict.rank) == (True, 1)
        assert verdict.sentence.endswith("; rank 0 waits for it")
        # In a call the third one is for what the program launched before it.
        events.reached = 3
        assert own_answer(board, progress, cast(LocalPeers, peers)).state == ("works" if is_in_step else "outside")


def test_a_collective_of_the_program_that_a_rank_does_not_make_is_told() -> None:
    board, events = Board(), _Events()
    board.stream_waits = StreamWaits(events.record)
    peers = cast(LocalPeers, SimpleNamespace(stopped=list, running=list))
    with board.call("run_train", "step", has_limit=True):
        board.stream_waits.add("the P2P transfer, with rank 1")
        answers = []
        for events.reached in (0, 1):
            answers.append(replace(own_answer(board, Progress(board, 20.0), peers), unmoved_seconds=301.0))
    verdict = judge(dict(enumerate(answers)), [], 1, LIMIT)
    assert (verdict.hangs, verdict.rank) == (True, 0)
    assert verdict.sentence == (
        "all ranks wait for each other for 301 s: rank 0 in run_train step 1, waits for 301 s in work of its program "
        "on the device, before run_train step 1; rank 1 passed it. Let all ranks make the program's collectives"
    )


def test_a_rank_outside_of_nxdpp_is_no_hang_though_it_does_not_move() -> None:
    verdict = judge({0: _answer("waits"), 1: _answer("outside", seconds=900.0), 2: _answer("works")}, [], 0, LIMIT)
    assert not verdict.hangs
    assert verdict.sentence == (
        "rank 1 is outside of nxdpp, after run_train step 17, for 900 s, in `Mlp.forward`, mlp.py:17; "
        "rank 0 waits for it"
    )


def test_a_rank_that_saves_is_no_hang() -> None:
    saves = replace(_answer("outside"), position="save_pretrained", is_in_call=True)
    verdict = judge({0: saves, 1: _answer("waits")}, [], 1, LIMIT)
    assert not verdict.hangs
    assert verdict.sentence.startswith("rank 0 is in save_pretrained, for 301 s, in ")


def test_a_stopped_rank_is_the_cause_also_beside_one_outside() -> None:
    answers = {0: _answer("waits", stopped=[2]), 1: _answer("outside")}
    verdict = judge(answers, [2], 0, LIMIT)
    assert (verdict.hangs, verdict.rank, verdict.stopped) == (True, 2, (2,))
    assert "is stopped by a signal" in verdict.sentence


def test_a_rank_that_compiles_is_named_and_no_hang() -> None:
    compiles = _answer("works", seconds=0.0, compiling_seconds=400.0)
    verdict = judge({0: _answer("waits"), 1: compiles, 2: _answer("waits")}, [], 0, LIMIT)
    assert (verdict.hangs, verdict.rank, verdict.reason) == (
        False,
        1,
        "the limit of a compilation is compile_timeout=3600 s",
    )
    assert verdict.sentence == "rank 1 compiles: run_train step 18, stage 2, for 400 s; ranks 0 and 2 wait for it"
