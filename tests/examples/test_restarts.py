"""torchrun restarts the main job, which goes on by itself: with the same ranks, and with fewer."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.examples.tiny import TINY_LLAMA

pytestmark = pytest.mark.one_python

PROGRAM = Path(__file__).with_name("job_with_fault.py")
STEPS = 6
FLAGS = f"--steps {STEPS} --batch-size 8 --seq-length 16 --num-microbatches 2 --checkpoint-every 2 --resume auto"


def _arguments(folder: Path, *flags: str) -> list[str]:
    config, text = folder.with_suffix(".json"), folder.with_suffix(".txt")
    config.write_text(json.dumps(TINY_LLAMA))
    text.write_bytes(bytes(range(32, 120)) * 30)
    files = ["--config", str(config), "--data", str(text), "--output", str(folder)]
    return [str(PROGRAM), str(folder.with_suffix(".fault")), *FLAGS.split(), *files, *flags]


def _agent(fault: str, *arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
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


def _check_metrics(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))


def test_a_killed_rank_does_not_end_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    agent = _agent("rank", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *_arguments(folder))
    try:
        output, _ = agent.communicate(timeout=240)
    finally:
        _end(agent)
    assert agent.returncode == 0, output
    assert folder.with_suffix(".fault").exists()
    assert "goes on after step 2" in output, output
    _check_metrics(folder)


def test_the_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """A host is gone with its agent: the replica that is left goes on with the whole batch."""
    folder = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rendezvous = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    rendezvous += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "fewer"]
    arguments = _arguments(folder, "--pipeline-parallel-size", "1", "--zero1")
    # An agent is taken for gone after a few seconds. The agent with the store of the rendezvous stays.
    limits = "last_call_timeout=15,keep_alive_interval=1"
    stays = _agent("none", *rendezvous, "--rdzv-conf", f"{limits},is_host=1", *arguments)
    goes = _agent("agent", *rendezvous, "--rdzv-conf", f"{limits},is_host=0", *arguments)
    try:
        gone, _ = goes.communicate(timeout=200)
        output, _ = stays.communicate(timeout=200)
    finally:
        _end(goes)
        _end(stays)
    assert (goes.returncode, stays.returncode) == (-signal.SIGKILL, 0), gone + output
    assert "goes on after step 2" in output, gone + output
    _check_metrics(folder)
