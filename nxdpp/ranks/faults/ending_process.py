"""Output and exit of a process that ends because of a fault."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn


def print_line(line: str) -> None:
    """Write ``line`` to standard error directly: another thread may hold Python's buffers."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def exit_process(last: Callable[[], object] | None = None) -> NoReturn:
    """Exit at once with status 1, after the buffered output is written and ``last`` is called."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    # A pipe without a reader must not block the exit.
    flush.join(1.0)
    if last is not None:
        last()
    os._exit(1)


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Return whether ``condition``, asked again after each ``pause``, became true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
    return met


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
