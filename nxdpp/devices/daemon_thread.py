"""A thread that runs calls in their order, and that the end of the interpreter does not wait for.

An executor's threads are joined at the end. A thread that blocks, for a peer that died, would keep the process alive.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThread:
    """One thread, which starts with the first call and ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """Run ``call`` after all earlier ones; the future gets its result or its error."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
        future: Future[_T] = Future()
        self._tasks.put((future, call))
        return future


def _run(tasks: "SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        # The thread waits for its next task without the tensors of this one.
        del task, future, call
