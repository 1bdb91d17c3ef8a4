"""Ctrl-C at the start of a process: an end in two lines. Nothing here takes time to import."""

import os
import signal
from typing import NoReturn

# The shell's status of a program that Ctrl-C has ended.
STATUS = 130
LINES = ("interrupted before the first step", "no checkpoint: nothing was trained")


def rank() -> int:
    """Number of this process."""
    return int(os.environ.get("RANK", "0"))


def end(lines: tuple[str, ...] = LINES) -> NoReturn:
    """End this process at once; rank 0 prints ``lines``."""
    if rank() == 0:
        os.write(1, "".join(f"{line}\n" for line in lines).encode())
    os._exit(STATUS)


def hear() -> None:
    """End this process at a Ctrl-C from now on, in place of Python's KeyboardInterrupt; only in the main thread."""
    signal.signal(signal.SIGINT, lambda *_: end())
