"""Training with frequent saves, killed with SIGKILL at random moments, and resumed by itself each time.

    python -m tests.checkpoint.distributed.killed_saves --ranks 4 --kills 100

The kill is of one rank that is drawn, of all ranks, or of torchrun's agent. torchrun's agent starts the ranks again; a
killed agent is started again. Saves are synchronous and asynchronous in turn. Half of the kills are at a moment that is
drawn, the others in a part of a save, or in the load, that is drawn. After each kill:

- each process of the training ends by itself;
- the newest checkpoint is whole, and not older than the last save that is known to be at its end;
- its values, optimizer, schedule and random states are those of a training that is not killed, to the bit.

At the end, no more is in the directory than the checkpoints to keep.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, LOCK
from nxdpp.checkpoint.distributed.document import parsed_document, read_document
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader
from tests.checkpoint.distributed.killable_training import INTERVAL, KEPT, MOMENTS, Job, Marks, launch
from tests.checkpoint.distributed.layouts import Layout

KINDS = ("rank", "all ranks", "agent")
_LAYOUTS = {
    4: {"pp2 x dp2, ZeRO-1": Layout(2, 1, True), "tp2 x pp2": Layout(2, 2), "dp4": Layout()},
    2: {"pp2": Layout(2), "tp2": Layout(1, 2), "dp2, ZeRO-1": Layout(1, 1, True)},
}
_SECONDS = 180.0
_END_SECONDS = 60.0
"""Time that the other processes have to end; the machine may be loaded."""
_LONGEST = 2.5
"""Longest time from the start of the ranks to a kill at a drawn moment."""


class Outcome(NamedTuple):
    """A kill, and all that is not as it should be after it.

    Attributes:
        kind, moment, layout: of the kill. The moment is that of rank 0.
        is_async: saves are asynchronous.
        trained: the last step before the kill.
        resumed: the step of the newest checkpoint; 0 without one.
        failures: sentences.
    """

    kind: str
    moment: str
    layout: str
    is_async: bool
    trained: int
    resumed: int
    failures: list[str]


class Victim:
    """A training in one layout, which is killed again and again."""

    def __init__(self, name: str, layout: Layout, ranks: int, folder: Path, draw: random.Random) -> None:
        folder.mkdir()
        self._name, self._folder, self._draw = name, folder, draw
        self._job = Job(layout, ranks, folder / "checkpoints", folder / "marks")
        self._marks = Marks(self._job.marks)
        self._agent: int | None = None
        self._states: list[tuple[Outcome, Any]] = []

    def kill(self, kind: str, is_async: bool) -> Outcome:
        """Wait for the start of all ranks, kill, and look at the result."""
        marks = self._marks
        marks[Marks.asynchronous] = is_async
        self._start()
        pids = self._pids()
        self._wait_for_the_moment()
        marks[Marks.kills] += 1
        assert self._agent is not None
        for process in {"rank": [self._one(pids)], "all ranks": pids, "agent": [self._agent]}[kind]:
            os.kill(process, signal.SIGKILL)
        moment = marks.moment
        if kind == "agent":
            os.waitpid(self._agent, 0)
            self._agent = None
        failures = self._left(pids)
        resumed, state = self._newest(failures)
        # A save that ends while the others notice the kill counts too.
        trained, completed = marks[Marks.trained], marks[Marks.completed]
        if resumed < completed:
            failures.append(f"step {completed} was saved, and step {resumed} is resumed")
        if trained - resumed > INTERVAL * (2 if is_async else 1):
            failures.append(f"step {trained} was trained, and step {resumed} is resumed")
        outcome = Outcome(kind, moment, self._name, is_async, trained, resumed, failures)
        self._states.append((outcome, state))
        for rank in range(self._job.ranks):
            marks[Marks.pids + rank] = 0
        marks[Marks.checked] = marks[Marks.kills]
        return outcome

    def end(self) -> list[str]:
        """Let the training end after a save, and compare all states with those of one that is not killed."""
        failures: list[str] = []
        self._marks[Marks.ends] = 1
        self._start()
        self._end_agent(failures)
        failures += self._left(self._pids())
        self._newest(failures)
        failures += self._garbage()
        steps = {outcome.resumed for outcome, _ in self._states if outcome.resumed}
        path = self._folder / "expected"
        if steps:
            job = self._job._replace(path=path, saved_steps=tuple(sorted(steps)))
            self._agent = launch(job, self._folder / "output.txt")
            self._end_agent(failures)
        for outcome, state in self._states:
            if outcome.resumed:
                others = _differences(_state(path / f"step_{outcome.resumed}"), state)
                if others:
                    outcome.failures.append(f"step {outcome.resumed} has other values than without a kill: {others}")
        return failures

    def stop(self) -> None:
        """Kill all that runs."""
        for process in [*([self._agent] if self._agent else []), *self._pids()]:
            if process and _is_alive(process):
                os.kill(process, signal.SIGKILL)

    def _start(self) -> None:
        if self._agent is None:
            self._agent = launch(self._job, self._folder / "output.txt")
        self._wait(lambda: all(self._pids()), "the ranks did not start")

    def _end_agent(self, failures: list[str]) -> None:
        agent = self._agent
        assert agent is not None
        statuses: list[int] = []

        def has_ended() -> bool:
            ended, status = os.waitpid(agent, os.WNOHANG)
            statuses.append(status)
            return bool(ended)

        self._wait(has_ended, "the training did not end")
        self._agent = None
        if statuses[-1]:
            failures.append(f"the training ended with {statuses[-1]}: {self._output()}")

    def _wait(self, condition: Callable[[], bool], message: str) -> None:
        end = time.monotonic() + _SECONDS
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"{message}:\n{self._output()}")
            time.sleep(0.005)

    def _wait_for_the_moment(self) -> None:
        """Sleep for a time that is drawn, or wait for a part of a save that is drawn."""
        aim = self._draw.choice(MOMENTS[1:])
        if self._draw.random() < 0.5:
            time.sleep(self._draw.uniform(0, _LONGEST))
            return
        end = time.monotonic() + 10.0
        while self._marks.moment != aim and time.monotonic() < end:
            time.sleep(0)

    def _one(self, pids: list[int]) -> int:
        """Rank 0, which makes a checkpoint count, or any rank."""
        return pids[0] if self._draw.random() < 0.5 else self._draw.choice(pids)

    def _left(self, pids: list[int]) -> list[str]:
        """Wait for the end of the ranks; those that do not end are killed and named."""
        end = time.monotonic() + _END_SECONDS
        while any(map(_is_alive, pids)) and time.monotonic() < end:
            time.sleep(0.01)
        left = [rank for rank, process in enumerate(pids) if _is_alive(process)]
        for rank in left:
            os.kill(pids[rank], signal.SIGKILL)
        return [f"ranks {left} did not end"] if left else []

    def _newest(self, failures: list[str]) -> tuple[int, Any]:
        """The step and the state of the checkpoint that a load without a tag takes."""
        tags = directory.tags(self._job.path)
        try:
            for tag in reversed(tags):
                state = _state(self._job.path / tag)
        except Exception as error:
            failures.append(f"{tag} counts, and is not whole: {error}")
            return 0, None
        return (state[0]["user_content"]["step"], state) if tags else (0, None)

    def _garbage(self) -> list[str]:
        """Names in the directory beside the checkpoints to keep."""
        path = self._job.path
        tags = directory.tags(path)
        found = {file.name for file in path.iterdir()} - {LOCK, directory.LATEST, *tags}
        for tag in tags:
            document = parsed_document(path / tag, read_document(path / tag))
            named = {span.file for span in document.metadata.storage_data.values()}
            found |= {f"{tag}/{file.name}" for file in (path / tag).iterdir()} - {f"{tag}/{name}" for name in named}
            found -= {f"{tag}/{DOCUMENT}"}
        failures = [f"left in the directory: {sorted(found)}"] if found else []
        return failures + ([f"{len(tags)} checkpoints are there: {tags}"] if len(tags) > KEPT else [])

    def _pids(self) -> list[int]:
        return [self._marks[Marks.pids + rank] for rank in range(self._job.ranks)]

    def _output(self) -> str:
        return (self._folder / "output.txt").read_text(errors="replace")[-5000:]


def _state(folder: Path) -> Any:
    """Content of a whole checkpoint, and the checksums of its values. Raises as a load does."""
    document = parsed_document(folder, read_document(folder))
    spans = document.metadata.storage_data
    with ChecksummedReader(folder) as reader:
        for span in spans.values():
            reader.verify(span)
    values = sorted((index.fqn, tuple(index.offset or ()), span.checksums) for index, span in spans.items())
    return json.loads(json.dumps([document.content, values]))


def _differences(one: Any, other: Any) -> list[str]:
    """Keys of the content, and names of the tensors, that differ."""
    content = [key for key in one[0] if one[0][key] != other[0].get(key)]
    return content + [entry[0] for entry in one[1] if entry not in other[1]]


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_trainings(folder: Path, ranks: int, kills: int, seed: int) -> tuple[list[Outcome], list[str]]:
    """Kill trainings ``kills`` times, and return what each kill has left, and what is wrong at the end."""
    draw = random.Random(seed)
    outcomes: list[Outcome] = []
    failures: list[str] = []
    layouts = _LAYOUTS[ranks]
    for number, (name, layout) in enumerate(layouts.items()):
        own = range(number * kills // len(layouts), (number + 1) * kills // len(layouts))
        if not own:
            continue
        victim = Victim(name, layout, ranks, folder / str(number), draw)
        try:
            for kill in own:
                outcomes.append(victim.kill(KINDS[kill % 3], kill // 3 % 2 == 1))
                print(f"{len(outcomes)}: {outcomes[-1]}", file=sys.stderr, flush=True)
            failures += [f"{name}: {failure}" for failure in victim.end()]
        finally:
            victim.stop()
    return outcomes, failures


def main(arguments: Sequence[str]) -> None:
    """Print the kills, and each failure; exit with 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, choices=sorted(_LAYOUTS))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="nxdpp-kills-") as folder:
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None
        outcomes, failures = kill_trainings(Path(folder), given.ranks, given.kills, given.seed)
    for number, outcome in enumerate(outcomes, 1):
        failures += [f"kill {number} of {outcome.kind}, {outcome.moment}: {failure}" for failure in outcome.failures]
    print("\n".join(["", *failures]))
    good = sum(not outcome.failures for outcome in outcomes)
    print(f"{good} of {given.kills} kills over {given.ranks} ranks: resumable, at most one interval lost, same values")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main(sys.argv[1:])
