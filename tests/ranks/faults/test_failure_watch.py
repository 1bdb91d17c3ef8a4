"""A failure ends all ranks within 10 s and is printed last; normal ends at different times stay normal."""

import os
import re
import socket
import subprocess
import sys
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


def _environment(**extra: str) -> dict[str, str]:
    launchers = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **extra}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _fork(case: str, rank: int) -> _Ended:
    """Run forked processes, with the store in rank 0; times count from the failure."""
    ended = run_program(PROGRAM, [case, str(rank)], RANKS, first_rank_has_store=True)
    return _Ended(ended.codes, ended.output, ended.time - _began(ended.output))


def _launch(tmp_path: Path, case: str, rank: int) -> _Ended:
    """Run fresh interpreters, with the store in rank 0; times count from the failure."""
    port = str(_free_port())
    path = tmp_path / "output.txt"
    with path.open("w") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, PROGRAM, case, str(rank)],
                env=_environment(RANK=str(number), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
                stdout=output,
                stderr=output,
            )
            for number in range(RANKS)
        ]
        try:
            deadline = time.monotonic() + 60
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    pytest.fail(f"still running after 60 s:\n{path.read_text()}")
                time.sleep(0.02)
            ended = time.time()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    text = path.read_text()
    return _Ended([process.returncode for process in processes], text, ended - _began(text))


def _began(text: str) -> float:
    began = re.search(r"(?:fails at|rank \d ends well at) (\S+)", text)
    assert began, text
    return float(began[1])


@pytest.mark.parametrize(
    ("case", "rank", "is_fresh"),
    [
        pytest.param("raise_in_one", 0, True, marks=pytest.mark.sweep),
        ("raise_in_one", 0, False),
        ("raise_in_one", 2, False),
        ("raise_from_all_reduce", 2, False),
        ("report_then_unwind_slowly", 1, False),
    ],
)
def test_an_error_ends_all_ranks_and_is_printed_last(tmp_path: Path, case: str, rank: int, is_fresh: bool) -> None:
    ended = _launch(tmp_path, case, rank) if is_fresh else _fork(case, rank)
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


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.sweep)])
def test_a_killed_rank_ends_all_ranks(rank: int) -> None:
    ended = _fork("be_killed", rank)
    assert ended.codes == [-9 if number == rank else 1 for number in range(RANKS)], ended.output
    assert ended.seconds < BOUND_SECONDS
    for other in range(RANKS):
        if other != rank:
            assert re.search(rf"^rank {other} stops because rank {rank} died", ended.output, re.M), ended.output
    if rank:
        # Without the store other ranks may print torch's traces later.
        assert "stops because" in ended.last_line, ended.output


def test_ranks_that_end_normally_seconds_apart_exit_with_0(tmp_path: Path) -> None:
    ended = _launch(tmp_path, "end_apart", 0)
    assert ended.codes == [0] * RANKS, ended.output
    assert ended.seconds > 2.0, "the ends must be seconds apart"
    assert ended.output.count("ends well") == RANKS
    assert "stops" not in ended.output
    assert "Warning" not in ended.output
    assert "c10d" not in ended.output


def test_torchrun_prints_the_first_error_last_and_names_it_as_root_cause() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", PROGRAM, "raise_in_one", "2"]
    ended = subprocess.run(
        command,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert ended.returncode == 1, ended.stdout
    first_error = ended.stdout.index("stage 1, 1F3")
    for other in (0, 1):
        assert ended.stdout.index(f"rank {other} stops because rank 2 failed") < first_error
    after = ended.stdout[first_error:].splitlines()[1:]
    assert "torch/distributed/elastic" in after[0], ended.stdout
    root_cause = ended.stdout[ended.stdout.index("Root Cause") :]
    assert re.search(r"rank\s*:\s*2 ", root_cause), root_cause


def _fail_in_a_multiprocessing_child(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    if rank == 1:
        error = ValueError("reported")
        failure_watch.report(error)
        raise error
    dist.recv(torch.empty(1), src=1)


def test_run_ranks_shows_both_the_error_and_who_stopped_for_it() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, _fail_in_a_multiprocessing_child)
    assert "ValueError: reported" in str(caught.value)


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


def _report_unwatched(rank: int) -> str:
    hook = sys.excepthook
    failure_watch.report(ValueError("before the watch"))
    parallel_state.initialize_model_parallel()
    parallel_state.destroy_model_parallel()
    failure_watch.report(ValueError("after the watch"))
    failure_watch.stop()
    return hook.__class__.__name__


def test_an_error_of_a_block_is_reported_and_propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = []
    monkeypatch.setattr(failure_watch, "report", errors.append)

    with pytest.raises(ValueError, match="the first error") as caught, failure_watch.reported():
        raise ValueError("the first error")

    assert errors == [caught.value]


def test_a_report_without_a_watch_does_nothing() -> None:
    assert len(run_ranks(2, _report_unwatched)) == 2
    assert len(run_ranks(1, _report_unwatched)) == 1


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
