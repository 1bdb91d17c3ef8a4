"""Run a test's function in one process per rank."""

import atexit
import faulthandler
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
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

from tests.support.fake_device import deadlock

WANTED = "NXDPP_TESTS_WANTED_MODULES"
"""Variable with the file of the modules that the server of ranks imports before its next fork."""

DEVICE = "NXDPP_TESTS_DEVICE"
"""Variable with the type of device on which ranks run, ``"cpu"`` by default or ``"fake"``; ``--device`` sets it."""

GRACE_SECONDS = 2.0
"""Time that the other ranks have after a first failure, so that the message shows their errors too."""

POLL_SECONDS = 0.1
"""Time between two looks at the output of ranks that run after a first failure."""

STACK_SECONDS = 0.3
"""Time that a running rank has to write its stacks before it is killed."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 400.0) -> list[Any]:
    """Return the results of ``function(rank, *args)`` in ``world_size`` processes, in rank order.

    ``function`` is defined at the top of a module. It, ``args`` and the results travel by pickle, tensors by value.
    Each process has one thread and torchrun's variables. The caller holds the store. ``function`` starts
    ``torch.distributed`` itself.

    Raises ``AssertionError`` if a rank raises or dies, or after ``timeout`` seconds. All ranks then end. The message
    has the error and the output of every rank, and the stacks of ranks that were running.
    """
    context = fork_server()
    want(function.__module__)
    store = store_for_ranks(timeout)
    payload = pickle.dumps((function, args))
    on_fake = os.environ.get(DEVICE, "cpu") == "fake"
    with tempfile.TemporaryDirectory(prefix="nxdpp-ranks-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                environment = rank_environment(rank, world_size, store.port)
                if on_fake:
                    environment["FAKE_LOG"] = folder
                ranks.append(_Rank(context, rank, Path(folder), environment, payload, timeout))
            failure = _wait_for_all(ranks, timeout)
            if failure:
                for running in ranks:
                    running.write_stacks()
                raise AssertionError("\n".join([f"{failure} of {world_size} ranks", *map(_account, ranks)]))
        finally:
            for started in ranks:
                started.end()
        if on_fake:
            deadlock.check(Path(folder))
        return [pickle.loads(finished.result) for finished in ranks]


class _Rank:
    """One process, as the caller sees it."""

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
        self.released = False
        self.output = folder / f"rank{rank}.txt"
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_run, args=(rank, theirs, self.output, environment, payload, timeout), name=f"rank {rank}"
        )
        self.process.start()
        theirs.close()

    @property
    def done(self) -> bool:
        """True once the rank has returned and ended, raised or died."""
        return self.ended or bool(self.error)

    @property
    def stops(self) -> bool:
        """True once the rank has written that it stops for a failure of another rank, whose error the caller has."""
        return re.search(r": see the traceback of rank \d+$", self.written.rstrip()) is not None

    @property
    def written(self) -> str:
        """All that the rank has written."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def awaited(self) -> Connection | int:
        """Object that becomes ready with the rank's outcome, then with its end."""
        return self.process.sentinel if self.result else self.connection

    def receive(self) -> None:
        """Receive the outcome or, after a result, the end; blocks."""
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

    def release(self) -> None:
        """Let the process end after its result."""
        self.released = True
        with suppress(OSError):
            self.connection.send_bytes(b"end")

    def write_stacks(self) -> None:
        """Make a running process write its threads' stacks into its output, then kill it."""
        # A rank that has returned waits for the others until it is released.
        self.was_running = not self.done and (not self.result or self.released)
        if self.was_running and self.process.pid is not None and self.process.is_alive():
            # It may end at any moment.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(STACK_SECONDS)
            self.process.kill()

    def end(self) -> None:
        """Kill and close the process."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _wait_for_all(ranks: list[_Rank], timeout: float) -> str:
    """Receive outcomes until all ranks are done, or until a failure or the timeout; return its description or ''."""
    deadline = time.monotonic() + timeout
    failure = ""
    while waiting := [rank for rank in ranks if not rank.done]:
        left = max(0.0, deadline - time.monotonic())
        ready = wait([rank.awaited for rank in waiting], min(left, POLL_SECONDS) if failure else left)
        if not ready:
            if time.monotonic() < deadline and not all(rank.stops for rank in waiting):
                continue
            running = [rank for rank in waiting if not rank.result] or waiting
            return failure or f"timeout after {timeout} s: {_names(running)} still running"
        for rank in waiting:
            if rank.awaited in ready:
                rank.receive()
                # A rank that ends early would break connections that others still make.
                if all(other.result or other.error for other in ranks):
                    for other in ranks:
                        other.release()
                if rank.error and not failure:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failure = f"failure, {_names([rank])} first,"
    return failure


def _account(rank: _Rank) -> str:
    """Outcome and output of one rank."""
    returned = "returned, " if rank.result else ""
    outcome = rank.error or f"{returned}{'still running, killed' if rank.was_running else 'ended'}\n"
    written = rank.written
    return f"---- rank {rank.rank}: {outcome}" + (f"---- rank {rank.rank} wrote:\n{written}" if written else "")


def _names(ranks: list[_Rank]) -> str:
    return "rank " + ", ".join(str(rank.rank) for rank in ranks)


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def store_for_ranks(timeout: float) -> TCPStore:
    """Store that the caller holds, as torchrun's agent does: no port can be free now and taken later.

    The caller listens on an address of version 4. torch looks up the name of each rank that connects, and the name
    server would be asked for that of an address of version 6.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        return TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The caller's environment variables and torchrun's."""
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
def _wanted_modules() -> Path:
    """File with the names of modules that the server imports before its next fork."""
    folder = tempfile.TemporaryDirectory(prefix="nxdpp-wanted-")
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "modules.txt"
    file.touch()
    return file


def want(*modules: str) -> None:
    """Have the server import ``modules`` once, before its next fork, and not each rank by itself."""
    with _wanted_modules().open("a") as file:
        file.write("".join(f"{module}\n" for module in modules))


@cache
def fork_server() -> ForkServerContext:
    """Server process with all imports done; each rank is its fork. It lives as long as the caller."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    before = dict(os.environ)
    os.environ[WANTED] = str(_wanted_modules())
    # The server is a fresh interpreter: its variables tell where modules are and how large thread pools are.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def on_fake_device(rank: int, payload: bytes) -> bytes:
    """Call the function of ``payload`` in a process whose tensors are on a fake accelerator; return its result."""
    # Only ranks on this device need its library.
    from tests.support.fake_device import ranks

    return ranks.call(rank, payload)


def _run(
    rank: int,
    connection: Connection,
    output: Path,
    environment: dict[str, str],
    payload: bytes,
    timeout: float,
) -> None:
    """Run one rank."""
    # The process ends soon after the timeout, and without its caller too.
    signal.alarm(math.ceil(timeout + GRACE_SECONDS) + 5)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        if os.environ.get(DEVICE, "cpu") == "fake":
            kind, content = b"result", on_fake_device(rank, payload)
        else:
            function, args = pickle.loads(payload)
            kind, content = b"result", pickle.dumps(function(rank, *args))
    except BaseException as error:
        kind, content = b"error", "".join(traceback.format_exception(error)).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(kind)
    connection.send_bytes(content)
    if kind == b"result":
        with suppress(EOFError, OSError):
            connection.recv_bytes()
    else:
        # Threads and exit functions of a failed rank may block.
        os._exit(1)
