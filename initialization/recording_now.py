"""Whether this thread is inside a constructor that ``deferred_init`` records."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def is_recording() -> bool:
    """Whether a constructor is being recorded in this thread."""
    return _depth.value > 0


@contextmanager
def marked_as_recording() -> Iterator[None]:
    """Make ``is_recording`` true meanwhile."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
