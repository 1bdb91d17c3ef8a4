"""Lock of a directory of checkpoints: one program saves in it.

::

    path/.lock     host and process; locked until that process ends, also by a kill

Two trainings that save in one directory would remove each other's files.
"""

import fcntl
import os
import socket
import time
from pathlib import Path

LOCK = ".lock"

_SECONDS = 10.0
"""Time that a process of the training before has to end."""

_held: dict[tuple[int, Path], int] = {}


def claim(path: Path) -> None:
    """Lock the directory ``path`` for this process, until it ends or calls ``release``.

    A file system without locks is not locked. Raises ``RuntimeError`` if another process holds it, and ``OSError``.
    """
    file = path.resolve() / LOCK
    key = os.getpid(), file
    if key in _held and _is_file(_held[key], file):
        return
    if key in _held:
        os.close(_held.pop(key))
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    _held[key] = descriptor


def release() -> None:
    """Give up the locks of this process."""
    for key in [key for key in _held if key[0] == os.getpid()]:
        os.close(_held.pop(key))


def _lock(descriptor: int, path: Path) -> None:
    end = time.monotonic() + _SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > end:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                raise RuntimeError(
                    f"{holder} saves checkpoints in {path} at the same time: give each training a directory of its "
                    f"own, or end the other one. No checkpoint was made."
                ) from error
            time.sleep(0.1)
        except OSError:
            # This file system has no locks.
            return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _is_file(descriptor: int, file: Path) -> bool:
    """Return whether ``file`` is still the one that is open: the directory can have been replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
