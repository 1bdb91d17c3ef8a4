"""Runs a test's function in real processes, one a rank."""

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

GRACE_SECONDS = 2.0
"""How long the others may go on after a first failure, so that their errors can be shown too."""

STACK_SECONDS = 0.3
"""How long a rank that still runs gets to write its stacks before it is killed."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """What ``function(rank, *args)`` returns in each of ``world_size`` processes, in rank order.

    ``function`` is a module's own function; it, ``args`` and the results travel by pickle, tensors by
    value. Each process has one thread and torchrun's variables, its store held by the caller;
    ``torch.distributed`` is left for ``function`` to start. A rank that raises or dies, or ``timeout``
    seconds from the start, ends all ranks with one ``AssertionError``: every rank's error and output,
    and the stacks of those that still ran.
    """
    context = _fork_server()
    # The store is the caller's, as torchrun's is its agent's: no port is free now and taken later.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    payload = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="nxdpp-ranks-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                environment = _environment(rank, world_size, store.port)
                ranks.append(_Rank(context, rank, Path(folder), environment, payload, timeout))
            failure = _wait_for_all(ranks, timeout)
            if failure:
                for running in ranks:
                    running.write_stacks()
                raise AssertionError("\n".join([f"{failure} of {world_size} ranks", *map(_account, ranks)]))
        finally:
            for started in ranks:
                started.end()
        return [pickle.loads(finished.result) for finished in ranks]


class _Rank:
    """One process, seen from the caller."""

    def __init__(
        self,
        context: ForkServerContext,
        rank: int,
        folder: Path,
        environment: dict[str, str],
        payload: bytes,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.result = b""
        self.error = ""
        self.ended = False
        self.was_running = False
        self.output = folder / f"rank{rank}.txt"
        self.connection, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=_run, args=(rank, theirs, self.output, environment, payload, timeout), name=f"rank {rank}"
        )
        self.process.start()
        theirs.close()

    @property
    def done(self) -> bool:
        """Whether it has returned and come to its end, raised or died."""
        return self.ended or bool(self.error)

    @property
    def awaited(self) -> Connection | int:
        """What becomes ready when there is news: its outcome first, then its end."""
        return self.process.sentinel if self.result else self.connection

    def receive(self) -> None:
        """Takes in the outcome or, after a result, the end; blocks until it is there."""
        if self.result:
            self.process.join()
            self.ended = True
            if self.process.exitcode:
                self.error = f"returned, then died: {_exit(self.process.exitcode)}\n"
            return
        try:
            kind, content = self.connection.recv_bytes(), self.connection.recv_bytes()
        except EOFError:
            self.process.join()
            self.error = f"died: {_exit(self.process.exitcode)}\n"
            return
        if kind == b"result":
            self.result = content
        else:
            self.error = content.decode()

    def write_stacks(self) -> None:
        """Has a process that still runs write its threads' stacks into its output, then kills it."""
        self.was_running = not self.done
        if self.was_running and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(STACK_SECONDS)
            self.process.kill()

    def end(self) -> None:
        """Leaves nothing behind."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _wait_for_all(ranks: list[_Rank], timeout: float) -> str:
    """Takes in outcomes until all ranks are done or it is of no use; says what failed, or nothing."""
    deadline = time.monotonic() + timeout
    failure = ""
    while waiting := [rank for rank in ranks if not rank.done]:
        ready = wait([rank.awaited for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            return failure or f"timeout after {timeout} s: {_names(waiting)} still running"
        for rank in waiting:
            if rank.awaited in ready:
                rank.receive()
                if rank.error and not failure:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failure = f"failure, {_names([rank])} first,"
    return failure


def _account(rank: _Rank) -> str:
    """What became of one rank, with all that it wrote."""
    returned = "returned, " if rank.result else ""
    outcome = rank.error or f"{returned}{'still running, killed' if rank.was_running else 'ended'}\n"
    output = rank.output.read_text(errors="replace") if rank.output.exists() else ""
    return f"---- rank {rank.rank}: {outcome}" + (f"---- rank {rank.rank} wrote:\n{output}" if output else "")


def _names(ranks: list[_Rank]) -> str:
    return "rank " + ", ".join(str(rank.rank) for rank in ranks)


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The caller's variables and torchrun's."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


@cache
def _fork_server() -> ForkServerContext:
    """A process with everything imported, of which each rank is a fork; it lives as long as the caller."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    before = dict(os.environ)
    # The server is a fresh interpreter: it finds modules, and sizes its thread pools, by its variables.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(
    rank: int,
    connection: Connection,
    output: Path,
    environment: dict[str, str],
    payload: bytes,
    timeout: float,
) -> None:
    """A rank's process, from its first line to its last."""
    # Outlives neither the caller's patience nor a caller that was killed.
    signal.alarm(math.ceil(timeout + GRACE_SECONDS) + 5)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(payload)
        kind, content = b"result", pickle.dumps(function(rank, *args))
    except BaseException as error:
        kind, content = b"error", "".join(traceback.format_exception(error)).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(kind)
    connection.send_bytes(content)
    if kind == b"error":
        # Whatever still blocks in a thread or an atexit of a failed rank has nothing left to say.
        os._exit(1)
