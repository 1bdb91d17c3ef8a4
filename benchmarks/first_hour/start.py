"""Start of ranks that run cases in turn. A case that fails or hangs ends its ranks; new ones run the cases after it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.first_hour.place import ONE_CHIP, OWN, Place
from tests.support.run_ranks import rank_environment, store_for_ranks

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, HUNG, NOT_RUN = "passed", "failed", "hung", "not run"
NOTHING = "proves nothing"
"""Result of a case on a layout that the makers of the device do not support, if it is refused or hangs."""

_END = "the end of the ranks"
"""Name of a case that is added where ranks have ended all cases, and then fail or hang."""
_START_SECONDS = 60.0
"""Seconds that the imports and the first call of a device may take beyond the limit of the first case."""
_GRACE_SECONDS = 30.0
"""Seconds in which the other ranks end after one has failed."""
_POLL_SECONDS, _STACK_SECONDS = 0.05, 1.0
_MOST_TEXT = 6000


class Ended(NamedTuple):
    """The ends of ranks.

    Attributes:
        codes: exit code of each rank.
        outputs: what each rank has written.
        lines: a line of JSON for each case that a rank has ended.
        at: time at which the last rank has ended.
        hung: ``True`` if ranks were killed at a limit.
    """

    codes: list[int]
    outputs: list[str]
    lines: list[list[dict[str, Any]]]
    at: float
    hung: bool

    def error(self) -> str:
        """Return the last text of each rank, shortest for many ranks."""
        most = _MOST_TEXT // len(self.codes)
        ends = zip(self.codes, self.outputs, strict=True)
        return "\n".join(
            f"---- rank {rank}, exit code {code}\n{output[-most:].strip()}" for rank, (code, output) in enumerate(ends)
        )


class Start(NamedTuple):
    """Cases for a number of ranks.

    Attributes:
        program: module with ``run(rank, case)``.
        cases: names of its cases.
        seconds: limit of each case.
        ranks: number of ranks.
        way: how they have their devices, as in ``place.py``.
        environment: variables in addition to torchrun's.
        label: words before the name of each case in the results.
        judge: takes a case that ends its ranks, as a kill does, and returns a result, figures and the error's text.
    """

    program: str
    cases: Sequence[str]
    seconds: float
    ranks: int = 1
    way: str = OWN
    environment: dict[str, str] = {}
    label: str = ""
    judge: Callable[[str, Ended], dict[str, Any]] | None = None

    def results(self, place: Place, deadline: float) -> Iterator[dict[str, Any]]:
        """Run all cases until the deadline of the part; yield the result of each."""
        left = list(self.cases)
        while left and time.monotonic() < deadline:
            # A case that ends its ranks has ranks of its own.
            cases = left[:1] if self.judge is not None else left
            began = time.monotonic()
            ended = self._run(place, cases, deadline)
            done = min(map(len, ended.lines))
            for number, case in enumerate(cases[:done]):
                yield self._named(case, _of_lines([lines[number] for lines in ended.lines]))
            if done < len(cases):
                found = {"seconds": round(time.monotonic() - began, 1), **self._end(cases[done], ended)}
                yield self._named(cases[done], found)
                done += 1
                if self.way == ONE_CHIP:
                    left = left[done:]
                    break
            elif any(ended.codes):
                yield self._named(_END, self._end(_END, ended))
            left = left[done:]
        yield from (self._named(case, {"result": NOT_RUN}) for case in left)

    def _named(self, case: str, found: dict[str, Any]) -> dict[str, Any]:
        return {"name": f"{self.label}{case}", "ranks": self.ranks, "devices": self.way, **found}

    def _end(self, case: str, ended: Ended) -> dict[str, Any]:
        """Return the result of a case in which ranks have ended."""
        if self.judge is not None:
            return self.judge(case, ended)
        result = NOTHING if self.way == ONE_CHIP else HUNG if ended.hung else FAILED
        return {"result": result, "error": ended.error()}

    def _run(self, place: Place, cases: Sequence[str], deadline: float) -> Ended:
        with tempfile.TemporaryDirectory(prefix="nxdpp-gpu-") as name:
            folder = Path(name)
            order = {"program": self.program, "place": place, "way": self.way, "cases": cases, "folder": name}
            store = store_for_ranks(300.0)
            processes = [
                _started(folder / f"{rank}.txt", json.dumps(order), rank_environment(rank, self.ranks, store.port)
                         | self.of_rank(rank, place))
                for rank in range(self.ranks)
            ]  # fmt: skip
            files = [folder / f"{rank}.jsonl" for rank in range(self.ranks)]
            try:
                hung = _wait(processes, files, self.seconds, deadline)
            finally:
                for process in processes:
                    _kill(process)
            lines = [[json.loads(line) for line in _text(file).splitlines()] for file in files]
            outputs = [_text(folder / f"{rank}.txt") for rank in range(self.ranks)]
            return Ended([process.returncode for process in processes], outputs, lines, time.time(), hung)

    def of_rank(self, rank: int, place: Place) -> dict[str, str]:
        """Return the variables of a rank in addition to torchrun's."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        given = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        if place.backend == "nccl":
            # Sums of cuBLAS are in one order with this workspace.
            given["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            if self.way == ONE_CHIP:
                # NCCL takes ranks of one device for those of several hosts.
                given |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        return given | self.environment


def _of_lines(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a case that all ranks have ended."""
    problems = [f"rank {rank}: {line['problem']}" for rank, line in enumerate(lines) if line["problem"]]
    found: dict[str, Any] = {
        "result": FAILED if problems else PASSED,
        "seconds": max(line["seconds"] for line in lines),
    }
    if problems:
        found["error"] = "\n".join(problems)
    return found | {"figures": [line["figures"] for line in lines]}


def _started(output: Path, order: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.first_hour.rank", order]
    with output.open("w") as file:
        # A session of its own: what the rank has started ends with it.
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], files: Sequence[Path], seconds: float, deadline: float) -> bool:
    """Wait for the ends of all ranks; return ``True`` after a limit, with the stacks in the outputs."""
    until, done, has_failed = time.monotonic() + _START_SECONDS + seconds, 0, False
    while any(process.poll() is None for process in processes):
        if not has_failed and any(process.poll() for process in processes):
            has_failed, until = True, time.monotonic() + _GRACE_SECONDS
        now_done = min(_text(file).count("\n") for file in files)
        if now_done > done and not has_failed:
            done, until = now_done, time.monotonic() + seconds
        if time.monotonic() > min(until, deadline):
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_SECONDS)
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
