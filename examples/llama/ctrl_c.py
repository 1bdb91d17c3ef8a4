"""Ctrl-C: the training ends after a step on which all ranks agree, or at once where nothing can be lost.

A thread hears of the signal even while the main thread waits for another rank. Under torchrun each rank gets the signal
from torchrun, which kills ranks that have not ended 30 s later.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from first_ctrl_c import LINES, STATUS, end

# Two signals within this time are one Ctrl-C: from the terminal, and from a launcher that passes it on.
SECONDS_OF_ONE = 1.0


class Interrupted(Exception):  # no error
    """End of the training by a Ctrl-C, raised on all ranks; ``lines`` are to be printed."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        super().__init__(*lines)
        self.lines = lines


class CtrlC:
    """The Ctrl-C of this process.

    Attributes:
        requested: ``True`` after a Ctrl-C that the program answers itself, after ``defer``.
        lines: printed by rank 0 where the process ends at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.lines = LINES
        self._is_deferred = False
        self._first = 0.0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear Ctrl-C in the block, in place of Python's KeyboardInterrupt; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours, pythons = os.pipe()
        os.set_blocking(pythons, False)
        # Python writes the number of each signal into the pipe at once, and calls its handler later.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        descriptor = signal.set_wakeup_fd(pythons, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._hear, args=(ours,), name="Ctrl-C", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGINT, before)
            os.close(pythons)
            thread.join()
            os.close(ours)

    def defer(self) -> None:
        """From now on only note the first Ctrl-C in ``requested``; a second one ends the process."""
        self._is_deferred = True

    def end_deferral(self) -> None:
        """From now on end the process at a Ctrl-C, and now if there was one."""
        self._is_deferred = False
        if self.requested:
            self._end()

    def _hear(self, pipe: int) -> None:
        while read := os.read(pipe, 1):
            if read[0] != signal.SIGINT:
                continue
            if not self._is_deferred:
                self._end()
            if not self.requested:
                self.requested, self._first = True, time.monotonic()
            elif time.monotonic() - self._first > SECONDS_OF_ONE:
                os._exit(STATUS)

    def _end(self) -> NoReturn:
        end(self.lines)
