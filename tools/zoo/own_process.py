"""Run a function for many names, each in a separate process with a time limit."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

_OUT_OF_MEMORY = Path("/proc/self/oom_score_adj")


def in_own_processes(
    function: Callable[[str], Any], names: Sequence[str], jobs: int, time_limit: float
) -> Iterator[tuple[str, Any]]:
    """Yield each name with the result of ``function(name)`` when it is ready; ``jobs`` processes run at a time.

    Processes are forked, so that modules are imported once. The result is a ``RuntimeError`` for a process that took
    more than ``time_limit`` seconds or ended without a result.
    """
    waiting = list(names[::-1])
    running: dict[Connection, tuple[str, ForkProcess, float]] = {}
    fork = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=_send_result, args=(function, name, writer))
            process.start()
            writer.close()
            running[reader] = (name, process, time.monotonic())
        wait(list(running), timeout=0.5)
        for reader, (name, process, started) in list(running.items()):
            late = time.monotonic() - started > time_limit
            if reader.poll() or late:
                result = _received(reader, time_limit)
                process.kill()
                process.join()
                del running[reader]
                yield name, result


def _send_result(function: Callable[[str], Any], name: str, writer: Connection) -> None:
    # Where memory is short, Linux kills this process and not the sweep.
    if _OUT_OF_MEMORY.exists():
        _OUT_OF_MEMORY.write_text("1000")
    writer.send(function(name))


def _received(reader: Connection, time_limit: float) -> Any:
    if not reader.poll():
        return RuntimeError(f"not done after {time_limit:.0f} s")
    try:
        return reader.recv()
    except EOFError:
        return RuntimeError("the process ended without a result")
