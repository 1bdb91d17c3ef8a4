"""Ctrl-C in the main job: two lines, one agreed step, a checkpoint to go on from, and no traceback of a rank."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.tiny import TINY_LLAMA, run_main_job
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

FOLDER = Path(__file__).parents[2] / "examples" / "llama"
STEPS = 6
FLAGS = f"--steps {STEPS} --batch-size 4 --seq-length 16 --num-microbatches 2 --pipeline-parallel-size 2".split()

# A program that says where it is, and hears of Ctrl-C as the main job does.
PROGRAM = """
import sys, time
from ctrl_c import CtrlC
ctrl_c = CtrlC()
with ctrl_c.heard():
    if sys.argv[1] == "deferred":
        ctrl_c.defer()
    print("ready", flush=True)
    while not ctrl_c.requested:
        time.sleep(0.01)
    print("noted", flush=True)
    if sys.argv[2] == "ends":
        ctrl_c.end_deferral()
    time.sleep(60)
"""


def _program(*arguments: str, rank: int = 0) -> subprocess.Popen[str]:
    environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    return program


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_lost_at_once(rank: int) -> None:
    printed, errors = _program("at once", "", rank=rank).communicate(timeout=20)
    lines = "interrupted before the first step\nno checkpoint: nothing was trained\n"
    assert (printed, errors) == (lines if rank == 0 else "", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_imports_are_ended_at_once(rank: int, tmp_path: Path) -> None:
    """Before the program has imported more than two modules."""
    (tmp_path / "difflib.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = subprocess.Popen(
        [sys.executable, str(FOLDER / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    lines = "interrupted before the first step\nno checkpoint: nothing was trained\n"
    assert program.communicate(timeout=20) == (lines if rank == 0 else "", "")
    assert program.returncode == 130


def test_a_second_ctrl_c_ends_the_process() -> None:
    """One that follows at once is of the same key: launchers pass the signal on."""
    program = _program("deferred", "stays")
    assert program.stdout is not None
    assert program.stdout.readline() == "noted\n"
    program.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(timeout=1.2)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=20) == ("", "")
    assert program.returncode == 130


def test_the_end_of_the_deferral_answers_an_earlier_ctrl_c() -> None:
    program = _program("deferred", "ends")
    printed, errors = program.communicate(timeout=20)
    assert (printed.splitlines()[1], errors) == ("interrupted before the first step", "")
    assert program.returncode == 130


def _arguments(folder: Path, *flags: str) -> list[str]:
    config, text = folder.with_suffix(".json"), folder.with_suffix(".txt")
    config.write_text(json.dumps({**TINY_LLAMA, "attention_dropout": 0.1}))
    text.write_bytes(bytes(range(32, 120)) * 30)
    return [*FLAGS, "--config", str(config), "--data", str(text), "--output", str(folder), *flags]


def _train(rank: int, interrupted: dict[int, int], *jobs: list[str]) -> list[tuple[int, str]]:
    """Run the jobs; in those of ``interrupted`` rank 1 hears of Ctrl-C within a step. Returns status and output."""
    ended = []
    for number, arguments in enumerate(jobs):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = _status(arguments, interrupted.get(number) if rank == 1 else None)
        ended.append((status, printed.getvalue()))
    return ended


def _status(arguments: list[str], interrupted: int | None) -> Any:
    from report import TrainingReport

    step_done = TrainingReport.step_done

    def stepped(self: Any, step: int, *values: Any) -> bool:
        if step == interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            # The thread hears of it within this time.
            time.sleep(0.2)
        ends: bool = step_done(self, step, *values)
        return ends

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingReport, "step_done", stepped)
        try:
            run_main_job(arguments)
        except SystemExit as end:
            return end.code
    return 0


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_ranks_end_after_one_step_and_go_on_from_it(tmp_path: Path) -> None:
    """Only rank 1 gets the signal, in the midst of a step."""
    whole, stopped, none, last = (tmp_path / name for name in ("whole", "stopped", "none", "last"))
    checkpoints = ["--checkpoint-every", "4"]
    jobs = [
        _arguments(whole),
        _arguments(stopped, *checkpoints),
        _arguments(stopped, *checkpoints, "--resume", "auto"),
        _arguments(none),
        _arguments(last),
    ]
    first, second = run_ranks(2, _train, {1: 2, 3: 1, 4: STEPS}, *jobs, timeout=200)
    assert [status for status, _ in first] == [status for status, _ in second] == [0, 130, 0, 130, 130]
    assert all(printed == "" for _, printed in second)
    # The signal is heard by the agreement of this step or of the next one.
    tag = next(tag for tag in ("step_3", "step_2") if (stopped / "checkpoints" / tag).exists())
    assert first[1][1].splitlines()[-2:] == [
        f"interrupted after step {tag[-1]} of {STEPS}",
        f"checkpoint: {stopped}/checkpoints/{tag}; the same flags with --resume auto go on",
    ]
    assert f"goes on after step {tag[-1]}" in first[2][1]
    assert _losses(stopped) == _losses(whole)
    line, remedy = first[3][1].splitlines()[-2:]
    assert line in (f"interrupted after step 1 of {STEPS}", f"interrupted after step 2 of {STEPS}")
    assert remedy == "no checkpoint: --checkpoint-every N writes some, and --resume auto goes on from them"
    assert not (none / "metrics.jsonl").exists()
    # After the last step the model is saved all the same, without an evaluation.
    assert first[4][1].splitlines()[-2:] == [
        f"interrupted after step {STEPS} of {STEPS}",
        f"checkpoint and metrics.jsonl are in {last}",
    ]
    assert _losses(last) == _losses(whole)


def _torchrun(arguments: list[str], until: str) -> str:
    """Press Ctrl-C under torchrun when ``until`` is printed; return what the ranks print, to stdout alone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    job = subprocess.Popen(
        [*command, str(FOLDER / "train.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A process group of its own, as that of a terminal.
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        before = ""
        for line in job.stdout:
            before += line
            if until in line:
                break
        os.killpg(job.pid, signal.SIGINT)
        printed, errors = job.communicate(timeout=100)
    finally:
        job.kill()
    # Only torchrun itself prints a traceback, of the signal that it got.
    assert errors.count("Traceback") == 1
    assert "SignalException" in errors
    assert "train.py" not in errors
    assert "rank " not in errors
    assert job.returncode != 0
    return before + printed


def test_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    printed = _torchrun(_arguments(folder, "--steps", "200", "--checkpoint-every", "200"), "step 10/")
    *_, when, checkpoint = printed.splitlines()
    assert when.startswith("interrupted after step ")
    step = when.split()[3]
    assert checkpoint == f"checkpoint: {folder}/checkpoints/step_{step}; the same flags with --resume auto go on"
    assert (folder / "checkpoints" / f"step_{step}" / "checkpoint.json").exists()
    assert printed.count("interrupted") == 1
