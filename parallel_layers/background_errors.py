"""Errors of threads in the background, which the next step raises."""

import threading

_kept: list[Exception] = []
_lock = threading.Lock()


def keep(error: Exception) -> None:
    """Keep ``error`` for the next call of ``raise_first``; for any thread."""
    with _lock:
        _kept.append(error)


def raise_first() -> None:
    """Raise the first error that was kept, and forget all; not collective."""
    with _lock:
        errors, _kept[:] = list(_kept), []
    if errors:
        raise errors[0]
