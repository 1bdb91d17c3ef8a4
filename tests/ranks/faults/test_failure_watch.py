"""A failure ends all ranks within 10 s and is printed last; normal ends at different times stay normal."""

import os
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from tests.support.run_program import run_program
from tests.support.run_ranks import run_ranks

PROGRAM = str(Path(__file__).with_name("watched_program.py"))
RANKS = 3
BOUND_SECONDS = 10.0


class _Ended(NamedTuple):
    codes: list[int | None]
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _fork(case: str, rank: int) -> _Ended:
    """Run forked processes, with the store in rank 0; times count from the failure."""
    ended = run_program(PROGRAM, [case, str(rank)], RANKS, first_rank_has_store=True)
    return _Ended(ended.codes, ended.output, ended.time - _began(ended.output))


def _began(text: str) -> float:
    began = re.search(r"(?:fails at|rank \d ends well at) (\S+)", text)
    assert began, text
    return float(began[1])


@pytest.mark.parametrize(("case", "rank"), [("raise_in_one", 0), ("report_then_unwind_slowly", 1)])
def test_an_error_ends_all_ranks_and_is_printed_last(case: str, rank: int) -> None:
    ended = _fork(case, rank)
    assert ended.codes == [1] * RANKS, ended.output
    assert ended.seconds < BOUND_SECONDS
    expected = "stage 1, 1F3" if case == "raise_in_one" else "ValueError: the first error"
    assert ended.last_line.endswith(expected), ended.output
    assert "Traceback" in ended.output
    assert ended.output.count("ValueError: the first error") == 1
    others = re.findall(
        rf"^rank (\d) stops because rank {rank} failed with ValueError: see the traceback of rank {rank}$",
        ended.output,
        re.M,
    )
    assert sorted(map(int, others)) == [other for other in range(RANKS) if other != rank], ended.output


def test_ranks_that_end_normally_seconds_apart_exit_with_0() -> None:
    ended = _fork("end_apart", 0)
    assert ended.codes == [0] * RANKS, ended.output
    assert ended.seconds > 2.0, "the ends must be seconds apart"
    assert ended.output.count("ends well") == RANKS
    assert "stops" not in ended.output
    assert "Warning" not in ended.output
    assert "c10d" not in ended.output


def _raise_in_a_spawned_child(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    if rank == 1:
        raise ValueError("the first error")
    dist.recv(torch.empty(1), src=(rank + 1) % 3)


def test_torch_multiprocessing_names_the_first_error() -> None:
    run_ranks(1, abs)  # starts the fork server
    start = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="the first error") as caught:
        start_processes(_raise_in_a_spawned_child, (_free_port(),), nprocs=3, start_method="forkserver")
    assert caught.value.error_index == 1
    assert time.monotonic() - start < BOUND_SECONDS


def refuse_in_a_fork(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    failure_watch.refuse_after_failure()
    child = os.fork()
    if child == 0:
        try:
            failure_watch.refuse_after_failure()
        except RuntimeError as error:
            os._exit(7 if "this process is a fork of a rank" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_fork_of_a_rank_makes_no_collective_calls() -> None:
    run_ranks(2, refuse_in_a_fork)
