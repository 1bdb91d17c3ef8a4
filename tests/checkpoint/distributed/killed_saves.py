"""Training with a save after each step, killed with SIGKILL at random moments, and resumed by itself each time.

    python -m tests.checkpoint.distributed.killed_saves --ranks 4 --kills 100

The kill is of one rank that is drawn, of all ranks, or of the launcher. Each start resumes without a tag. Each value of
the model is the number of steps, so that a mixture of two checkpoints is seen. A rank writes the number of a step after
its save: at most one interval is lost when the resumed step is that number or the next.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import SGD

from nxdpp import parallel_state
from nxdpp.trainer.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint

_SECONDS = 120.0
# Longest time between the first finished save of a start and a kill: several saves.
_LONGEST = 0.5
_KINDS = ("rank", "all", "launcher")
_MODULE = "tests.checkpoint.distributed.killed_saves"


class Outcome(NamedTuple):
    """A kill, the last step whose save had ended, and the step that a process alone resumes with."""

    kind: str
    saved: int
    resumed: int

    @property
    def is_good(self) -> bool:
        """At most the save in flight is lost."""
        return self.resumed >= self.saved


def kill_trainings(directory: Path, ranks: int, kills: int, seed: int) -> list[Outcome]:
    """Kill a training ``kills`` times, and return what each kill has left."""
    draw = random.Random(seed)
    outcomes = []
    for number in range(kills):
        kind = _KINDS[number % len(_KINDS)]
        _kill_once(directory, ranks, kind, draw)
        outcomes.append(Outcome(kind, _number_in(directory / "saved"), resumed_step(directory / "checkpoints")))
    return outcomes


def resumed_step(path: Path) -> int:
    """Load the newest checkpoint in this process, and return its step; -1 if its values are not those of the step."""
    model = _model()
    content = load_checkpoint(path, None, model, SGD(model.parameters(), lr=0.0))
    values = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    return int(content["step"]) if values == {float(content["step"])} else -1


def _kill_once(directory: Path, ranks: int, kind: str, draw: random.Random) -> None:
    before = _number_in(directory / "saved")
    for file in directory.glob("pid-*"):
        file.unlink()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", _MODULE]
    with (directory / "output.txt").open("w") as output:
        # A launcher that is killed leaves its temporary files.
        environment = {**os.environ, "TMPDIR": str(directory)}
        command = [sys.executable, *launch, "--train", str(directory)]
        launcher = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    own: list[int] = []
    try:
        deadline = time.monotonic() + _SECONDS
        while _number_in(directory / "saved") <= before:
            if time.monotonic() > deadline or launcher.poll() is not None:
                raise AssertionError(f"the training did not resume:\n{(directory / 'output.txt').read_text()}")
            time.sleep(0.01)
        own = [_number_in(directory / f"pid-{rank}") for rank in range(ranks)]
        time.sleep(draw.uniform(0, _LONGEST))
        for process in {"rank": [draw.choice(own)], "all": own, "launcher": [launcher.pid]}[kind]:
            _kill(process)
        end = time.monotonic() + 2.0
        while time.monotonic() < end and any(map(_is_alive, own)):
            time.sleep(0.05)
    finally:
        for process in [launcher.pid, *own]:
            _kill(process)
        launcher.wait()
        while any(map(_is_alive, own)):
            time.sleep(0.05)


def _kill(process: int) -> None:
    if _is_alive(process):
        os.kill(process, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    """Return whether ``process`` is a rank or launcher of this command that has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and _MODULE in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


def _number_in(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


def _put(file: Path, number: int) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(str(number))
    new.rename(file)


def _model() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def _train(directory: Path) -> None:
    """Resume, then add 1 to each value and save, for ever: 2 checkpoints are kept."""
    signal.alarm(int(_SECONDS))
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    _put(directory / f"pid-{rank}", os.getpid())
    parallel_state.initialize_model_parallel()
    path = directory / "checkpoints"
    model = _model()
    optimizer = SGD(model.parameters(), lr=1.0)
    content = load_checkpoint(path, None, model, optimizer) if has_checkpoint(path) else None
    step = 0 if content is None else content["step"]
    while True:
        step += 1
        for parameter in model.parameters():
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        save_checkpoint(path, f"step_{step}", model, optimizer, user_content={"step": step}, num_kept_ckpts=2)
        if rank == 0:
            _put(directory / "saved", step)


def main(arguments: Sequence[str]) -> None:
    """Print the number of kills after which the training resumes; exit with 1 unless it is all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train is not None:
        _train(given.train)
    with tempfile.TemporaryDirectory(prefix="nxdpp-kills-") as folder:
        outcomes = kill_trainings(Path(folder), given.ranks, given.kills, given.seed)
    for outcome in outcomes:
        print(f"killed {outcome.kind}: step {outcome.saved} was saved, step {outcome.resumed} is resumed")
    good = sum(outcome.is_good for outcome in outcomes)
    print(f"{good} of {given.kills} kills over {given.ranks} ranks lost at most one interval")
    sys.exit(good < given.kills)


if __name__ == "__main__":
    main(sys.argv[1:])
