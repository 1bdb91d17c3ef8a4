"""torchrun restarts the main job, which goes on by itself.

Its agent is called as torchrun calls it.
"""

import json
import os
import signal
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

Fault = tuple[int, str, int]
"""A rank that is killed after a ``step``, or within the ``save`` of it, and the number of the step."""


def _arguments(folder: Path) -> list[str]:
    return [*FLAGS.split(), *files_of(folder, attention_dropout=0.1)]


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def _launch(rank: int, *arguments: Any) -> dict[int, tuple[int, str]]:
    """Be torchrun's agent of processes that train; return the exit status and error of each that failed.

    The processes are forks of this one, which has done the imports.
    """
    configuration = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="job",
        monitor_interval=0.1,
        max_restarts=3,
        start_method="fork",
    )
    try:
        elastic_launch(configuration, _train)(*arguments)
    except ChildFailedError as error:
        return {failed: (failure.exitcode, str(error)) for failed, failure in error.failures.items()}
    return {}


def _train(faults: dict[int, Fault], killed_file: Path, arguments: list[str]) -> None:
    """Train with the fault of this start, by its number; a killed rank adds a byte to ``killed_file``."""
    from nxdpp.checkpoint.distributed import save

    killed, where, number = faults.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (-1, "", 0))
    is_killed = killed == int(os.environ["RANK"])
    write = MetricsFile.write
    last = 0

    def die() -> None:
        with killed_file.open("a") as file:
            file.write("x")
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
