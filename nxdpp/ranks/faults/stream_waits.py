"""Messages that a stream of the device waits for, while the host goes on.

On NCCL, and on other backends of devices, ``work.wait()`` stops the stream. The host stops later, where it next reads a
value of the device::

    host     0F0 launched ─ wait for 0B0's gradient ─ step ends ─ loss.item() ──────────── (in the program)
    stream        └─ forward ─ waits for rank 1 ·······································

So an event behind each wait tells whether the stream has passed it. Until then the rank waits for others, wherever its
host is: the hang watch never takes it for the cause.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class StreamEvent(Protocol):
    """A place in a stream of the device."""

    def query(self) -> bool:
        """Return whether the device has reached it; any thread may ask."""


class StreamWaits:
    """The waits that the stream has not passed, the first one first.

    Args:
        record: returns an event at the end of the present work of the device.

    Attributes:
        passed: number of waits that the stream has passed.
    """

    def __init__(self, record: Callable[[], StreamEvent]) -> None:
        self.passed = 0
        self._record = record
        self._left: deque[tuple[StreamEvent, object]] = deque()
        self._lock = threading.Lock()

    def add(self, wait: object) -> None:
        """Note that the stream waits in ``wait``, as ``str`` gives it."""
        with self._lock:
            self._left.append((self._record(), wait))
            self._pass()

    def first(self) -> object:
        """Return the wait that the stream is in, or ``None``; any thread may ask."""
        with self._lock:
            self._pass()
            return self._left[0][1] if self._left else None

    def _pass(self) -> None:
        while self._left and self._left[0][0].query():
            self._left.popleft()
            self.passed += 1
