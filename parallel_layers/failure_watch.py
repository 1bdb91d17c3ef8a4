"""One rank's failure ends all ranks, and its error is the last thing printed.

Each rank has a thread that asks the world's store, over a connection of its own, whether the job is
ending. What happens when rank 2 raises, while the others wait for its messages::

    rank 2   report: writes itself into the store    waits for answers    prints its error, exits 1
    others                 find rank 2 there, say so in one line, answer        wait,       exit 1

Rank 2 keeps its connections until all have answered, so that nobody's "connection closed" gets in before
its error. A rank that is killed writes nothing; then the connection error of a neighbour is the first,
and the neighbour waits a little before it claims so. Every wait is bounded: from the first failure to the
last exit take at most some seven seconds, mostly under one.

Where the store lives in rank 0 and not in a launcher, rank 0's normal end is told to the others before
the store goes, and ends the watch; the store gone without a word ends them.
"""

import contextlib
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in its __all__

_ENDING = "ending"
"""Key of why the job ends: the failed rank, or ``_HOST_LEFT``; who writes first, wins."""

_ANSWERS = "answers"
"""Key that counts the ranks that know, or that have left the watch: each counts once."""

_PRINTED = "printed"
"""Key that is there once the failed rank has printed its error."""

_DONE = "done"
"""Key that counts the ranks that stop and will ask the store nothing more."""

_HOST_LEFT = "host left"

_POLL_SECONDS = 0.5
_SLOWEST_POLL_SECONDS = 2.0
_RANKS_PER_POLL = 128
"""In larger worlds each rank asks less often, so that the store answers no more than 256 times a second."""

_SUSPECT_SECONDS = 1.0
"""How long a connection error waits for the failure that caused it to be reported."""

_ANSWER_SECONDS = 3.0
"""How long the failed rank waits for the others, and a leaving host for those it leaves."""

_PRINT_SECONDS = 5.0
"""How long the others wait for the failed rank's error to be printed; longer than that may wait for them."""

_DONE_SECONDS = 1.0
"""How long the store's host stays for the others; torch would print traces for a store that is gone."""

_AFTERWARDS_SECONDS = 0.3
"""How much later the others exit, so that torchrun, which looks every 0.1 s, sees the failed rank first."""

_CONNECTION_ERRORS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "ncclRemoteError",
    "ncclSystemError",
)

_watch: "_Watch | None" = None
_watches = count()


def start() -> None:
    """Begins to watch the default process group; collective, ``initialize_model_parallel`` calls it."""
    global _watch
    if _watch is not None:
        _watch.leave()
    _watch = _Watch()
    sys.excepthook = _ExceptHook(_watch, sys.excepthook)
    # Unlike atexit's, this also runs at the end of a multiprocessing child.
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)


def stop() -> None:
    """Ends the watch on this rank; all ranks call it, ``destroy_model_parallel`` does.

    While an exception passes (``try: train() finally: destroy_model_parallel()``) the watch stays on, for
    the exception to be reported where it ends the process.
    """
    global _watch
    if _watch is not None and sys.exception() is None:
        _watch.leave()
        _watch = None


def report(error: BaseException) -> None:
    """Has all other ranks stop because of ``error``; not collective, does nothing where nobody watches.

    Returns if this rank is the first to fail: let ``error`` pass on, so that it is printed and ends the
    process. (A program that catches it goes on alone, the others stop all the same.) If another rank was
    first, this process ends here, with one line, exit status 1.
    """
    watch = _active()
    if watch is not None:
        watch.report(error)


class _Watch:
    """This rank's part in the watch."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.process = os.getpid()
        self.owns_failure = False
        self.left = threading.Event()
        self._store_is_gone = False
        self._hosts = self.rank == 0 and not _launcher_has_store()
        # Where this rank is the host, this reference keeps the store up after the process group is gone.
        self._world_store: Store = dist.distributed_c10d._get_default_store()
        # A main thread that blocks in a call of the store holds that connection, not this one.
        connection = self._world_store.clone()  # type: ignore[attr-defined]  # left out of torch's stubs
        self._store = PrefixStore(f"nxdpp_failure_watch_{next(_watches)}", connection)
        self._ends = threading.Lock()
        slowed = _POLL_SECONDS * self.world_size / _RANKS_PER_POLL
        self._poll_seconds = min(max(_POLL_SECONDS, slowed), _SLOWEST_POLL_SECONDS)
        self._thread = threading.Thread(target=self._poll, name="nxdpp failure watch", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Claims the failure for this rank, or ends the process for another's."""
        if self.owns_failure or self.left.is_set():
            return
        if self._ends.locked():
            # The thread is on its way out for another's failure, of which this error may be an echo.
            _wait_for_the_end()
        try:
            if _is_connection_error(error):
                self._wait_until(lambda: self._ending() is not None, _SUSPECT_SECONDS)
            ending = self._store.compare_set(_ENDING, "", str(self.rank)).decode()
        except RuntimeError:
            # Nobody is left to tell, and this error is the best there is.
            self._store_is_gone = True
            ending = str(self.rank)
        if ending == str(self.rank):
            self.owns_failure = True
        elif ending != _HOST_LEFT:
            self._stop_for(ending, f" ({type(error).__name__} here)")

    def wait_for_answers(self) -> None:
        """Until all other ranks know of this one's end or have left, within bounds."""
        self._wait_until(lambda: self._count(_ANSWERS) >= self.world_size - 1, _ANSWER_SECONDS)

    def let_others_exit(self) -> None:
        """Tells them that the error is printed."""
        if not self._store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.set(_PRINTED, "yes")
            self._outlast_others()

    def leave(self) -> None:
        """Ends the watch on this rank, which has come to its end unharmed."""
        if self.owns_failure or self.left.is_set():
            return
        if not self._ends.acquire(blocking=False):
            _wait_for_the_end()
        self.left.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_SECONDS)
        with contextlib.suppress(RuntimeError):
            if self._hosts:
                self._store.compare_set(_ENDING, "", _HOST_LEFT)
                self.wait_for_answers()
            else:
                self._store.add(_ANSWERS, 1)

    def _poll(self) -> None:
        """The thread: waits for an ending and does as it says."""
        while not self.left.wait(self._poll_seconds):
            try:
                ending = self._ending()
            except RuntimeError:
                self._lose_contact()
                return
            if ending == _HOST_LEFT:
                self.leave()
                return
            if ending == str(self.rank):
                return
            if ending is not None:
                self._stop_for(ending)

    def _ending(self) -> str | None:
        if not self._store.check([_ENDING]):
            return None
        ending: str = self._store.get(_ENDING).decode()
        return ending

    def _stop_for(self, failed: str, addition: str = "") -> NoReturn:
        """Ends this process because rank ``failed`` has failed, after that has printed its error."""
        if not self._ends.acquire(blocking=False):
            _wait_for_the_end()
        _say(f"rank {self.rank} stops because rank {failed} failed{addition}; its error follows")
        with contextlib.suppress(RuntimeError):
            self._store.add(_ANSWERS, 1)
            self._wait_until(lambda: self._store.check([_PRINTED]), _PRINT_SECONDS)
            self._store.add(_DONE, 1)
        time.sleep(_AFTERWARDS_SECONDS)
        self._outlast_others()
        _exit()

    def _lose_contact(self) -> None:
        """Ends this process because the store is gone, unless it is ending by itself."""
        if self.owns_failure or not self._ends.acquire(blocking=False):
            return
        host = "the launcher's store" if _launcher_has_store() else "rank 0's store, which died or was killed"
        _say(f"rank {self.rank} stops: lost contact with {host}")
        _exit()

    def _outlast_others(self) -> None:
        """Where this rank is the store's host, stays until the others need it no more, within bounds."""
        if self._hosts:
            self._wait_until(lambda: self._count(_DONE) >= self.world_size - 1, _DONE_SECONDS)

    def _count(self, key: str) -> int:
        """How many ranks have added themselves to ``key``; all of them where nobody can be asked."""
        if not self._store_is_gone:
            try:
                counted: int = self._store.add(key, 0)
                return counted
            except RuntimeError:
                self._store_is_gone = True
        return self.world_size

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)


class _ExceptHook:
    """What an exception that nobody caught goes through: the watch, then the hook that was there before."""

    def __init__(
        self,
        watch: _Watch,
        previous: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    ) -> None:
        self._watch = watch
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._watch is not _active():
            self._previous(kind, error, trace)
            return
        self._watch.report(error)
        if not self._watch.owns_failure:
            self._previous(kind, error, trace)
            return
        self._watch.wait_for_answers()
        self._previous(kind, error, trace)
        self._watch.let_others_exit()
        # The interpreter's own way out may wait for messages that nobody sends any more.
        _exit()


def _active() -> _Watch | None:
    """The watch, unless it is over or was inherited by a fork."""
    if _watch is None or _watch.left.is_set() or _watch.process != os.getpid():
        return None
    return _watch


def _at_exit() -> None:
    """At the end of the process: leaves the watch, or reports what no hook has seen.

    That is the exception that ends a multiprocessing child, and one that another's hook has printed.
    """
    watch = _active()
    if watch is None:
        return
    passing = sys.exception()
    error = passing or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        watch.leave()
        return
    watch.report(error)
    if not watch.owns_failure:
        return
    watch.wait_for_answers()
    if passing is not None:
        # torch.multiprocessing ends a child by SystemExit, from within the handling of its error.
        is_wrapped = isinstance(passing, SystemExit) and passing.__context__ is not None
        traceback.print_exception(passing.__context__ if is_wrapped else passing)
    watch.let_others_exit()
    _exit()


def _is_connection_error(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, says only that another rank has gone."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ConnectionError | dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(link, RuntimeError) and any(words in str(link) for words in _CONNECTION_ERRORS):
            return True
        link = link.__cause__ or link.__context__
    return False


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _say(line: str) -> None:
    """One line to standard error, past Python's buffers, which another thread may hold."""
    os.write(2, f"{line}\n".encode())


def _wait_for_the_end() -> NoReturn:
    """Another thread ends this process."""
    time.sleep(_PRINT_SECONDS + _ANSWER_SECONDS)
    _exit()


def _exit() -> NoReturn:
    """Exit status 1 at once, with what was printed so far."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    # A pipe that nobody reads must not keep the process.
    flush.join(1.0)
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
