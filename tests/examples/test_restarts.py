"""torchrun restarts the main job, which goes on by itself: with the same ranks, and with fewer."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nxdpp.checkpoint.files.checksummed import write_checksummed
from tests.examples.tiny import TINY_LLAMA
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

PROGRAM = Path(__file__).with_name("job_with_fault.py")
STEPS = 6
FLAGS = f"--steps {STEPS} --batch-size 8 --seq-length 16 --num-microbatches 2 --checkpoint-every 2 --resume auto"
RESTARTS = 3

Fault = tuple[int, str, int]
"""A rank that is killed, ``step`` or ``save``, and the number of the step after which, or whose save it is."""


def _arguments(folder: Path, *flags: str) -> list[str]:
    config, text = folder.with_suffix(".json"), folder.with_suffix(".txt")
    config.write_text(json.dumps({**TINY_LLAMA, "attention_dropout": 0.1}))
    text.write_bytes(bytes(range(32, 120)) * 30)
    files = ["--config", str(config), "--data", str(text), "--output", str(folder)]
    return [*FLAGS.split(), *files, *flags]


def _agent(fault: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    job = [str(PROGRAM), str(folder.with_suffix(".fault")), *_arguments(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments, *job, "--pipeline-parallel-size", "1", "--zero1"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _end(agent: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def _launch(rank: int, start: Callable[..., Any], *arguments: Any) -> dict[int, tuple[int, str]]:
    """Be torchrun's agent of two processes that call ``start``; return the exit status and error of each that failed.

    The processes are forks of this one, which has done the imports.
    """
    configuration = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=RESTARTS,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(configuration, start)(*arguments)
    except ChildFailedError as error:
        return {failed: (failure.exitcode, str(error)) for failed, failure in error.failures.items()}
    return {}


def _train(faults: dict[int, Fault], killed_file: Path, arguments: list[str]) -> None:
    """Train with the fault of this start, by its number; a killed rank adds a byte to ``killed_file``."""
    import train
    from report import TrainingReport

    from nxdpp.checkpoint.distributed import save

    killed, where, number = faults.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (-1, "", 0))
    is_killed = int(os.environ["RANK"]) == killed
    step_done = TrainingReport.step_done
    last = 0

    def die() -> None:
        with killed_file.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(self: Any, step: int, *values: Any) -> None:
        nonlocal last
        step_done(self, step, *values)
        last = step
        if is_killed and (where, step) == ("step", number):
            die()

    def written(*values: Any) -> Any:
        spans = write_checksummed(*values)
        if is_killed and (where, last) == ("save", number):
            die()
        return spans

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingReport, "step_done", dying)
        patch.setattr(save, "write_checksummed", written)
        train.main(arguments)


@pytest.mark.parametrize("flags", [[], ["--checkpoint-async"]], ids=["now", "background"])
def test_killed_ranks_do_not_end_the_job(flags: list[str], tmp_path: Path) -> None:
    """Before the first checkpoint, while one is written, and between two, with dropout."""
    faults: dict[int, Fault] = {0: (1, "step", 1), 1: (0, "save", 4), 2: (0, "step", 5)}
    folder, expected, killed = tmp_path / "run", tmp_path / "expected", tmp_path / "killed"
    assert run_ranks(1, _launch, _train, faults, killed, _arguments(folder, *flags), timeout=200) == [{}]
    assert len(killed.read_text()) == len(faults)
    assert run_ranks(1, _launch, _train, {}, killed, _arguments(expected), timeout=200) == [{}]
    assert _losses(folder) == _losses(expected)


def test_a_rank_that_always_dies_ends_the_job(tmp_path: Path) -> None:
    """After the restarts, with the rank that died as the cause."""
    faults: dict[int, Fault] = dict.fromkeys(range(RESTARTS + 1), (1, "step", 1))
    killed = tmp_path / "killed"
    (failed,) = run_ranks(1, _launch, _train, faults, killed, _arguments(tmp_path / "run"), timeout=200)
    assert len(killed.read_text()) == len(faults)
    assert failed[1][0] == -signal.SIGKILL
    # torchrun's own words: the first failure that it has seen.
    cause = failed[1][1].partition("Root Cause")[2]
    assert "rank      : 1" in cause
    assert f"Signal {signal.SIGKILL.value} (SIGKILL)" in cause


def test_the_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """A host is gone with its agent: the replica that is left goes on with the whole batch."""
    folder = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rendezvous = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    rendezvous += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "fewer"]
    # An agent is taken for gone after a few seconds. The agent with the store of the rendezvous stays.
    limits = "last_call_timeout=15,keep_alive_interval=1"
    stays = _agent("none", folder, *rendezvous, "--rdzv-conf", f"{limits},is_host=1")
    goes = _agent("agent", folder, *rendezvous, "--rdzv-conf", f"{limits},is_host=0")
    try:
        gone, _ = goes.communicate(timeout=200)
        output, _ = stays.communicate(timeout=200)
    finally:
        _end(goes)
        _end(stays)
    assert (goes.returncode, stays.returncode) == (-signal.SIGKILL, 0), gone + output
    assert "goes on after step 2" in output, gone + output
    _losses(folder)
