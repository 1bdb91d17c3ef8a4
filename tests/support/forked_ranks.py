"""Run a function as each of several ranks, in forks of this process: its imports are done."""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.run_ranks import rank_environment, store_for_ranks


def forked_ranks(world_size: int, function: Callable[[int], Any], timeout: float = 120.0) -> list[Any]:
    """Return the results of ``function(rank)`` in rank order; the exception of a rank is its result.

    The first exception ends the other ranks, whose result is then ``None``. So does the ``timeout`` in seconds.
    """
    fork = multiprocessing.get_context("fork")
    store = store_for_ranks(timeout)
    readers: list[Connection] = []
    processes = []
    for rank in range(world_size):
        reader, writer = fork.Pipe(duplex=False)
        environment = rank_environment(rank, world_size, store.port)
        process = fork.Process(target=_run, args=(partial(function, rank), environment, writer))
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    results: list[Any] = [None] * world_size
    waiting = dict(zip(readers, range(world_size), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout)
        for one in ready:
            assert isinstance(one, Connection)
            rank = waiting.pop(one)
            try:
                results[rank] = one.recv()
            except EOFError:
                results[rank] = RuntimeError(f"rank {rank} ended without a result")
        if not ready or any(isinstance(result, Exception) for result in results):
            break
    for process in processes:
        process.kill()
        process.join()
    if any(result is None for result in results) and not any(isinstance(result, Exception) for result in results):
        results[0] = RuntimeError(f"not done after {timeout:.0f} s")
    return results


def _run(function: Callable[[], Any], environment: dict[str, str], writer: Connection) -> None:
    os.environ.update(environment)
    try:
        result = function()
    except Exception as error:
        result = error
    writer.send(result)
