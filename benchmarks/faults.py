"""Faults of one of 4 ranks: who is named, and how soon all ranks have ended. ``python -m benchmarks.faults``.

Each fault happens in a small training job, started with RANK and WORLD_SIZE by hand and by torchrun. The table has the
time from the fault to the end of the last process, torchrun's own included, and to the end of the first step after a
restart by torchrun, which loads the checkpoint of the step before. For faults that can only be seen as lack of
progress it is the time beyond ``hang_timeout``. 10 to 20 minutes on 2 cores. It exits with status 1 if a rank has not
named the faulty one, or a job has not trained again. docs/faults.md has the longest times of each kind.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import session_line
from tests.support import faulty_program
from tests.support.run_program import run_program

RANKS = 4
HANG_TIMEOUT = 5.0
_LIMIT_SECONDS = 120.0
_NOT_SEEN_PLAIN = "ImportError before the start"
_TERM_SECONDS = 10.0
_HEADER = """\
| fault | rank | by hand: time, ranks that name it | torchrun: time, ranks that name it | trains again |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """A fault of one rank.

    ``name`` is a fault of ``tests/support/faulty_program.py``; ``hangs`` is true if only a lack of progress shows it.
    """

    name: str
    rank: int
    hangs: bool = False

    @property
    def named_by(self) -> list[int]:
        """The ranks that print a line with the faulty one."""
        if self.name == _NOT_SEEN_PLAIN:
            return []
        if self.name == "one step more":
            return [self.rank]
        return [rank for rank in range(RANKS) if rank != self.rank or self.name in ("loop", "sleep")]


CASES = (
    Case("exception", 2),
    Case("exception between steps", 2),
    Case("SIGKILL", 2),
    Case("SIGKILL", 0),
    Case("SIGTERM", 2),
    Case("SIGSEGV", 2),
    Case("os._exit", 2),
    Case("sys.exit(0)", 2),
    Case("sys.exit(3)", 0),
    Case("sys.exit in a layer", 2),
    Case("one step fewer", 2),
    Case("one step more", 2),
    Case("SIGSTOP", 2, hangs=True),
    Case("SIGSTOP", 0, hangs=True),
    Case("loop", 2, hangs=True),
    Case("sleep", 2, hangs=True),
    Case("ImportError before the start", 2),
)


@dataclass(frozen=True)
class Outcome:
    """The end of a job: seconds since the fault, and the ranks that name the faulty one in their last line."""

    seconds: float
    naming: list[int]
    output: str


def run_plain(case: Case) -> Outcome:
    """Run ``case`` with RANK and WORLD_SIZE by hand; rank 0 has the store."""
    ended = run_program(_program(), _arguments(case), RANKS, _LIMIT_SECONDS, first_rank_has_store=True)
    return _outcome(case, ended.output, ended.time)


def run_torchrun(case: Case) -> Outcome:
    """Run ``case`` by torchrun."""
    return _outcome(case, _torchrun_output(case), time.time())


def seconds_to_train_again(case: Case) -> float | None:
    """Run ``case`` by torchrun, which restarts the job; ``None`` if not all ranks train again."""
    with tempfile.TemporaryDirectory(prefix="nxdpp-faults-") as folder:
        try:
            output = _torchrun_output(case, "--max-restarts", "1", checkpoints=str(Path(folder) / "checkpoints"))
        except subprocess.TimeoutExpired:
            return None
    again = [float(found) for found in re.findall(r"^trains again at (\S+)", output, re.M)]
    return _seconds(case, output, max(again)) if len(again) == RANKS else None


def _torchrun_output(case: Case, *options: str, checkpoints: str = "") -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), *options]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", _program(), *_arguments(case)]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FAULTY_CHECKPOINTS": checkpoints}
    with tempfile.TemporaryDirectory(prefix="nxdpp-faults-") as folder:
        output = Path(folder) / "output.txt"
        with output.open("w") as file:
            launcher = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            try:
                launcher.wait(_LIMIT_SECONDS)
            finally:
                # Ends its workers too.
                launcher.terminate()
                try:
                    launcher.wait(_TERM_SECONDS)
                finally:
                    launcher.kill()
        return output.read_text()


def _seconds(case: Case, output: str, end: float) -> float:
    """Return the time from the fault to ``end``, beyond the limit of a hang."""
    began = [float(found) for found in re.findall(r"^fault at (\S+)", output, re.M)]
    return end - max(began) - (HANG_TIMEOUT if case.hangs else 0.0)


def _outcome(case: Case, output: str, ended: float) -> Outcome:
    seconds = _seconds(case, output, ended)
    lines = {int(rank): line for rank, line in re.findall(r"^(?:.*\]:)?rank (\d) stops because (.*)", output, re.M)}
    named = rf"\brank {case.rank}\b"
    return Outcome(seconds, sorted(rank for rank, line in lines.items() if re.search(named, line)), output)


def _program() -> str:
    return str(faulty_program.__file__)


def _arguments(case: Case) -> list[str]:
    return [case.name, str(case.rank), str(HANG_TIMEOUT)]


def _cell(outcome: Outcome) -> str:
    return f"{outcome.seconds:.1f} s, {len(outcome.naming)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all faults, or only the faults whose names contain ``--only``, and print the table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(dict.fromkeys(case.name for case in CASES))
    parser.add_argument("--only", default="", metavar="PART", help=f"run the faults with PART in their names: {names}")
    parser.add_argument("--show", action="store_true", help="print what the ranks wrote, too")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"--only {options.only}: no fault has this in its name. There are {names}.")
    print(session_line(), _HEADER, sep="\n\n")
    unnamed = 0
    for case in cases:
        cells = []
        for run in (run_plain, run_torchrun):
            if run is run_plain and case.name == _NOT_SEEN_PLAIN:
                cells.append("not seen")
                continue
            try:
                outcome = run(case)
            except (AssertionError, subprocess.TimeoutExpired):
                cells.append(f"not ended in {_LIMIT_SECONDS:.0f} s")
                unnamed += 1
                continue
            cells.append(_cell(outcome))
            unnamed += outcome.naming != case.named_by
            if options.show:
                print(outcome.output)
        again = seconds_to_train_again(case)
        cells.append("not restarted" if again is None else f"{again:.1f} s")
        unnamed += again is None
        print(f"| {case.name} | {case.rank} | {' | '.join(cells)} |", flush=True)
    if unnamed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
