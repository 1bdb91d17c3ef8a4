"""Several jobs at once, each with its own ranks. One of them runs a step at a time.

Other load on the machine then affects all alike. The other jobs' ranks wait at the store, without work::

    job a   step ──▶ . . . . . . . . step ──▶
    job b            step ──▶
    job c                     step ──▶
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

from tests.support.run_ranks import run_ranks

_NOTICE_SECONDS = 0.05
"""Time between the word to start and the start: longer than a read of the store."""

_POLL_SECONDS = 0.02
_END = b"end"


class Job(NamedTuple):
    """A job: ``function(rank, turns, *arguments)`` on each of its ranks runs a step at each of ``turns``."""

    ranks: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Turns:
    """The turns of one rank of a job; travels by pickle."""

    def __init__(self, name: str, port: int, ranks: int, steps: int, timeout: float) -> None:
        self._name, self._port, self._ranks, self._steps, self._timeout = name, port, ranks, steps, timeout

    def run(self, step: Callable[[int], None]) -> list[float]:
        """Call ``step`` with its number at each turn; return the seconds from each start to the end of this rank."""
        store = TCPStore("127.0.0.1", self._port, is_master=False, timeout=timedelta(seconds=self._timeout))
        seconds = []
        for number in range(self._steps):
            word = store.get(f"{self._name} {number}")
            if word == _END:
                break
            start = float(word)
            time.sleep(max(0.0, start - time.perf_counter()))
            step(number)
            seconds.append(time.perf_counter() - start)
            if store.add(f"{self._name} {number} ended", 1) == self._ranks:
                store.set(f"{self._name} {number} done", "")
        return seconds


def run_in_turn(jobs: Mapping[str, Job], steps: int, timeout: float) -> dict[str, list[Any]]:
    """Return the results of the ranks of each job, each of which runs ``steps`` steps.

    Raises ``AssertionError`` if a rank of a job raises or dies, or after ``timeout`` seconds.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = {
            name: threads.submit(
                run_ranks,
                job.ranks,
                job.function,
                Turns(name, store.port, job.ranks, steps, timeout),
                *job.arguments,
                timeout=timeout,
            )
            for name, job in jobs.items()
        }
        try:
            for number in range(steps):
                for name in jobs:
                    _take_turn(store, name, number, list(running.values()))
        finally:
            # Ranks of jobs that have not failed end too.
            for name in jobs:
                for number in range(steps):
                    if not store.check([f"{name} {number}"]):
                        store.set(f"{name} {number}", _END.decode())
    return {name: future.result() for name, future in running.items()}


def _take_turn(store: TCPStore, name: str, number: int, running: Sequence["Future[list[Any]]"]) -> None:
    store.set(f"{name} {number}", str(time.perf_counter() + _NOTICE_SECONDS))
    while not store.check([f"{name} {number} done"]):
        for future in running:
            if future.done():
                future.result()
        time.sleep(_POLL_SECONDS)
