"""torchrun restarts the main job, which goes on by itself: with the same ranks, and with fewer.

Its agent is called as torchrun calls it.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nxdpp.checkpoint.files.checksummed_writer import write_checksummed
from nxdpp.watching.metrics_file import MetricsFile
from tests.examples.tiny import files_of, run_main_job
from tests.support.run_ranks import run_ranks

STEPS = 6
FLAGS = f"--steps {STEPS} --batch-size 8 --seq-length 16 --num-microbatches 2 --checkpoint-every 2 --resume"

Fault = tuple[int | None, str, int]
"""A rank that is killed, or each; ``step``, ``save`` or ``agent``; and the number of a step.

A rank is killed after that step, alone or with its agent, or within its save.
"""


def _arguments(folder: Path, *flags: str, dropout: float = 0.1) -> list[str]:
    return [*FLAGS.split(), *files_of(folder, attention_dropout=dropout), *flags]


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def _launch(rank: int, *arguments: Any, **changes: Any) -> dict[int, tuple[int, str]]:
    """Be torchrun's agent of processes that train; return the exit status and error of each that failed.

    The processes are forks of this one, which has done the imports.
    """
    options: dict[str, Any] = {"max_nodes": 1, "nproc_per_node": 2, "rdzv_endpoint": "localhost:0"}
    configuration = LaunchConfig(
        min_nodes=1,
        rdzv_backend="c10d",
        run_id="job",
        monitor_interval=0.1,
        max_restarts=3,
        start_method="fork",
        **(options | changes),
    )
    try:
        elastic_launch(configuration, _train)(*arguments)
    except ChildFailedError as error:
        return {failed: (failure.exitcode, str(error)) for failed, failure in error.failures.items()}
    return {}


def _launch_two(rank: int, *arguments: Any) -> list[int | None]:
    """Be two hosts with an agent each and a process each; return the exit status of the agents.

    The first has the store of the rendezvous. The faults are those of the second. An agent is taken for gone after a
    few seconds.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    limits = {"last_call_timeout": 5, "keep_alive_interval": 1}
    agents = []
    for is_host in (True, False):
        rendezvous = {
            "max_nodes": 2,
            "nproc_per_node": 1,
            "rdzv_endpoint": endpoint,
            "rdzv_configs": {**limits, "is_host": is_host},
        }
        faults, *others = arguments
        given = {} if is_host else faults, *others
        agents.append(multiprocessing.get_context("fork").Process(target=_be_agent, args=(given, rendezvous)))
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    return [agent.exitcode for agent in agents]


def _be_agent(arguments: tuple[Any, ...], rendezvous: dict[str, Any]) -> None:
    """End with status 1 if a process has failed for good."""
    sys.exit(len(_launch(0, *arguments, **rendezvous)))


def _train(faults: dict[int, Fault], killed_file: Path, arguments: list[str]) -> None:
    """Train with the fault of this start, by its number; a killed rank adds a byte to ``killed_file``."""
    from nxdpp.checkpoint.distributed import save

    killed, where, number = faults.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (-1, "", 0))
    is_killed = killed in (None, int(os.environ["RANK"]))
    write = MetricsFile.write
    last = 0

    def die() -> None:
        with killed_file.open("a") as file:
            file.write("x")
        if where == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(self: MetricsFile, *values: Any) -> None:
        nonlocal last
        write(self, *values)
        last = self._step
        if is_killed and where != "save" and last == number:
            die()

    def written(*values: Any) -> Any:
        spans = write_checksummed(*values)
        if is_killed and (where, last) == ("save", number):
            die()
        return spans

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFile, "write", dying)
        patch.setattr(save, "write_checksummed", written)
        run_main_job(arguments)


def test_killed_ranks_do_not_end_the_job(tmp_path: Path) -> None:
    """While a checkpoint is written, and after it, with dropout."""
    faults: dict[int, Fault] = {0: (0, "save", 4), 1: (1, "step", 5)}
    folder, expected, killed = tmp_path / "run", tmp_path / "expected", tmp_path / "killed"
    assert run_ranks(1, _launch, faults, killed, _arguments(folder), timeout=200) == [{}]
    assert len(killed.read_text()) == len(faults)
    assert run_ranks(1, _launch, {}, killed, _arguments(expected), timeout=200) == [{}]
    assert _losses(folder) == _losses(expected)


def test_the_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """A host is gone with its agent: the replica that is left goes on with the whole batch."""
    faults: dict[int, Fault] = {0: (None, "agent", 3)}
    folder, expected, killed = tmp_path / "run", tmp_path / "expected", tmp_path / "killed"
    replicas = ["--pipeline-parallel-size", "1", "--zero1"]
    arguments = _arguments(folder, *replicas, dropout=0.0)
    assert run_ranks(1, _launch_two, faults, killed, arguments, timeout=200) == [[0, -signal.SIGKILL]]
    assert len(killed.read_text()) == 1
    assert run_ranks(1, _launch, {}, killed, _arguments(expected, *replicas, dropout=0.0)) == [{}]
    assert _losses(folder)[:2] == _losses(expected)[:2]
    assert _losses(folder) == pytest.approx(_losses(expected), rel=1e-6)
