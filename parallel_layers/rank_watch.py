"""One rank's part in the failure watch: the keys in the world's store and the thread that polls them.

A killed rank writes nothing. The connection error of a neighbour is then the first failure. The neighbour waits a short
time for another report before it claims the failure. If rank 0 hosts the store, it announces its normal end,
which ends the watch on all ranks. If the store disappears without that, the other ranks stop.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in its __all__

# Keys in the store.
_ENDING = "ending"  # the reason: the failed rank, or _HOST_LEFT; the first writer wins
_ANSWERS = "answers"  # number of ranks that know the reason or have left the watch
_PRINTED = "printed"  # present once the failed rank has printed its error
_DONE = "done"  # number of ranks that stop and no longer need the store

_HOST_LEFT = "host left"

_POLL_SECONDS = 0.5
_SLOWEST_POLL_SECONDS = 2.0
_RANKS_PER_POLL = 128  # with more ranks each polls less often: the store answers at most 256 times a second

_SUSPECT_SECONDS = 1.0  # wait of a connection error for a report of the failure that caused it
_ANSWER_SECONDS = 3.0  # wait of the failed rank, and of a leaving host, for the other ranks
_PRINT_SECONDS = 5.0  # wait for the failed rank's error; longer than the failed rank waits itself
_DONE_SECONDS = 1.0  # wait of the store's host for the others: torch prints traces when the store is gone
_AFTERWARDS_SECONDS = 0.3  # torchrun polls every 0.1 s and must see the failed rank exit first

_CONNECTION_ERRORS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "ncclRemoteError",
    "ncclSystemError",
)

_watches = count()


class RankWatch:
    """The watch of one rank, from its construction to ``leave`` or to the end of the process."""

    def __init__(self, store: Store) -> None:
        # True if this rank is the first to fail, so that its error is the one to print.
        self._owns_failure = False
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._process = os.getpid()
        self._left = threading.Event()
        self._ends = threading.Lock()
        self._store_is_gone = False
        self._hosts = self._rank == 0 and not _launcher_has_store()
        # On the host this reference keeps the store alive after the process group is destroyed.
        self._world_store = store
        # A main thread that blocks in a call of the store holds that connection, not this one.
        connection = self._world_store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = PrefixStore(f"nxdpp_failure_watch_{next(_watches)}", connection)
        slowed = _POLL_SECONDS * self._world_size / _RANKS_PER_POLL
        self._poll_seconds = min(max(_POLL_SECONDS, slowed), _SLOWEST_POLL_SECONDS)
        self._thread = threading.Thread(target=self._poll, name="nxdpp failure watch", daemon=True)
        self._thread.start()

    def is_active(self) -> bool:
        """Return whether this process started the watch and has not left it."""
        return not self._left.is_set() and self._process == os.getpid()

    def report(self, error: BaseException) -> bool:
        """Claim the failure for this rank, or end the process because of an earlier failure of another rank.

        Returns whether this rank owns the failure. It does not if the store's host has left.
        """
        if self._owns_failure or self._left.is_set():
            return self._owns_failure
        if self._ends.locked():
            # The thread ends this process for a failure of another rank, which may have caused this error.
            _wait_for_exit()
        try:
            if _is_connection_error(error):
                _wait_until(lambda: self._ending() is not None, _SUSPECT_SECONDS)
            ending = self._store.compare_set(_ENDING, "", str(self._rank)).decode()
        except RuntimeError:
            # Without the store no other rank can be told, and no better error is known.
            self._store_is_gone = True
            ending = str(self._rank)
        self._owns_failure = ending == str(self._rank)
        if not self._owns_failure and ending != _HOST_LEFT:
            self._stop_for(ending, f" ({type(error).__name__} here)")
        return self._owns_failure

    def end_process(self, print_error: Callable[[], object]) -> NoReturn:
        """End the process of the rank that owns the failure: ``print_error`` runs when the other ranks are silent."""
        self._wait_for_answers()
        print_error()
        if not self._store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.set(_PRINTED, "yes")
            self._outlast_others()
        # The normal exit of the interpreter may wait for messages that no rank sends any more.
        _exit()

    def leave(self) -> None:
        """End the watch on this rank, which ends normally."""
        if self._owns_failure or self._left.is_set():
            return
        if not self._ends.acquire(blocking=False):
            _wait_for_exit()
        self._left.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_SECONDS)
        with contextlib.suppress(RuntimeError):
            if self._hosts:
                self._store.compare_set(_ENDING, "", _HOST_LEFT)
                self._wait_for_answers()
            else:
                self._store.add(_ANSWERS, 1)

    def _poll(self) -> None:
        """Wait for an ending and act on it; runs in the thread."""
        while not self._left.wait(self._poll_seconds):
            try:
                ending = self._ending()
            except RuntimeError:
                self._lose_contact()
                return
            if ending == _HOST_LEFT:
                self.leave()
                return
            if ending == str(self._rank):
                return
            if ending is not None:
                self._stop_for(ending)

    def _ending(self) -> str | None:
        if not self._store.check([_ENDING]):
            return None
        ending: str = self._store.get(_ENDING).decode()
        return ending

    def _stop_for(self, failed: str, addition: str = "") -> NoReturn:
        """End this process because of rank ``failed``, after that rank has printed its error."""
        if not self._ends.acquire(blocking=False):
            _wait_for_exit()
        _print_line(f"rank {self._rank} stops because rank {failed} failed{addition}; its error follows")
        with contextlib.suppress(RuntimeError):
            self._store.add(_ANSWERS, 1)
            _wait_until(lambda: self._store.check([_PRINTED]), _PRINT_SECONDS)
            self._store.add(_DONE, 1)
        time.sleep(_AFTERWARDS_SECONDS)
        self._outlast_others()
        _exit()

    def _lose_contact(self) -> None:
        """End this process because the store is gone, unless the process already ends."""
        if self._owns_failure or not self._ends.acquire(blocking=False):
            return
        host = "the launcher's store" if _launcher_has_store() else "rank 0's store, which died or was killed"
        _print_line(f"rank {self._rank} stops: lost contact with {host}")
        _exit()

    def _wait_for_answers(self) -> None:
        """Wait, for a limited time, until all other ranks know of this rank's end or have left."""
        _wait_until(lambda: self._count(_ANSWERS) >= self._world_size - 1, _ANSWER_SECONDS)

    def _outlast_others(self) -> None:
        """On the store's host, wait for a limited time until the other ranks no longer need the store."""
        if self._hosts:
            _wait_until(lambda: self._count(_DONE) >= self._world_size - 1, _DONE_SECONDS)

    def _count(self, key: str) -> int:
        """Number of ranks that added themselves to ``key``; the world size once the store is gone."""
        if not self._store_is_gone:
            try:
                counted: int = self._store.add(key, 0)
                return counted
            except RuntimeError:
                self._store_is_gone = True
        return self._world_size


def _exit() -> NoReturn:
    """Exit at once with status 1, after the buffered output is written."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    # A pipe without a reader must not block the exit.
    flush.join(1.0)
    os._exit(1)


def _wait_for_exit() -> NoReturn:
    """Wait for another thread that ends this process."""
    time.sleep(_PRINT_SECONDS + _ANSWER_SECONDS)
    _exit()


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_connection_error(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, only tells that another rank has gone."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, ConnectionError | dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in _CONNECTION_ERRORS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _print_line(line: str) -> None:
    """Write ``line`` to standard error directly: another thread may hold Python's buffers."""
    os.write(2, f"{line}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
