"""Run a script in one process per rank, each a fork of the server that has imported everything.

A process ends like an interpreter that runs the script: an error goes to ``sys.excepthook``, exit functions follow.
"""

import ast
import ctypes
import multiprocessing.util
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy
import torch

from tests.support.run_ranks import fork_server, rank_environment, store_for_ranks, want


class Ended(NamedTuple):
    """Exit codes in rank order, all that the ranks wrote, the time at which the last rank ended, and each one's output.

    With an output of their own, ``output`` has that of one rank after the other. Of ranks that run ``as_torchrun``,
    ``outputs`` has what each has printed, without its errors.
    """

    codes: list[int | None]
    output: str
    time: float
    outputs: list[str]


def run_program(
    script: str,
    arguments: Sequence[str],
    ranks: int,
    timeout: float = 400.0,
    first_rank_has_store: bool = False,
    own_outputs: bool = False,
    folder: Path | None = None,
    as_torchrun: bool = False,
) -> Ended:
    """Run ``script`` on ``ranks`` ranks, in ``folder`` if it is given; ``AssertionError`` after ``timeout`` seconds.

    The caller holds the store, as torchrun does, unless the first rank is to hold it. With ``own_outputs`` each rank
    writes into a file of its own; otherwise all write into one, in the order of time. ``as_torchrun`` is for scripts
    that a reader starts: no rank shares a seed with another, each imports from the folder of the script, and errors
    stand in a file apart.
    """
    own_outputs = own_outputs or as_torchrun
    want(*imported_names(Path(folder or "", script)))
    store = store_for_ranks(timeout)
    environments = [rank_environment(rank, ranks, store.port) for rank in range(ranks)]
    if first_rank_has_store:
        # Its port is free from now on.
        del store
        for environment in environments:
            del environment["TORCHELASTIC_USE_AGENT_STORE"]
    with tempfile.TemporaryDirectory(prefix="nxdpp-program-") as written_to:
        outputs = [Path(written_to) / f"output{rank if own_outputs else ''}.txt" for rank in range(ranks)]
        errors = [file.with_name(f"errors{rank}.txt") if as_torchrun else file for rank, file in enumerate(outputs)]
        processes: list[Any] = []

        def written() -> str:
            return "".join(file.read_text() for file in dict.fromkeys([*outputs, *errors]) if file.exists())

        try:
            for environment, *files in zip(environments, outputs, errors, strict=True):
                given = (script, list(arguments), environment, *files, timeout, folder, as_torchrun)
                processes.append(fork_server().Process(target=_run, args=given))
                processes[-1].start()
            deadline = time.monotonic() + timeout
            while running := [process.sentinel for process in processes if process.is_alive()]:
                if not wait(running, max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"{len(running)} ranks run after {timeout} s:\n{written()}")
            ended = time.time()
            codes = [process.exitcode for process in processes]
            return Ended(codes, written(), ended, [file.read_text() for file in outputs])
        finally:
            for process in processes:
                process.kill()
                process.join()


def imported_names(script: Path) -> list[str]:
    """Return what ``script`` imports, as ``module`` or ``module:name``."""
    names: list[str] = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names += [f"{node.module}:{each.name}" for each in node.names]
    return names


def _run(
    script: str,
    arguments: list[str],
    environment: dict[str, str],
    output: Path,
    errors: Path,
    timeout: float,
    folder: Path | None,
    as_torchrun: bool,
) -> NoReturn:
    if folder is not None:
        os.chdir(folder)
    signal.alarm(int(timeout) + 5)
    # A job in the background of a shell ignores it, and so would its programs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, stream in ((output, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if as_torchrun:
        for seed in (torch.seed, random.seed, numpy.random.seed):
            seed()
        sys.path.insert(0, os.path.dirname(script))
    os._exit(run_script(script, arguments))


def take_signals_of_a_program() -> None:
    """Have the signals of a program that torchrun starts, in a fork of its agent."""
    # A function gets a signal when its parent ends.
    ctypes.CDLL(None).prctl(1, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for handled in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(handled, signal.SIG_DFL)


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` in this process as an interpreter does, its exit functions included; return the exit status."""
    sys.argv = [script, *arguments]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        status = 1
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    # The way out of an interpreter, outside of the error's handling.
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return status
