"""Errors of threads in the background, which the next step raises on every rank.

::

    rank 0   step 5 ── thread: error ── tells 5 ─┐            step 6: raised
    rank 1   step 3 ── thread: error ── tells 3 ─┴▶ 6 = 5 + 1 ── step 4 ── step 5 ── step 6: raised

The threads agree on a step that no rank has begun. A main thread that begins one in the meantime waits for them.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _BackgroundError:
    """An error, and the number of the step that raises it; ``None`` while the ranks agree on it."""

    error: Exception
    step: int | None = None


_kept: list[_BackgroundError] = []
_changed = threading.Condition()
_begun = 0


def keep(error: Exception, all_of: Callable[[int], list[int]]) -> None:
    """Keep ``error`` for a step that no rank has begun; collective over the threads of all ranks.

    ``all_of`` gives the values of all ranks. If it fails, the next step of this rank raises ``error``.
    """
    one = _BackgroundError(error)
    with _changed:
        if not _kept:
            atexit.register(_end_with_error)
        _kept.append(one)
        begun = _begun
    try:
        step = max(all_of(begun)) + 1
    except Exception as failure:
        error.add_note(f"The ranks could not agree on a step that raises it: {failure}")
        step = 0
    with _changed:
        one.step = step
        _changed.notify_all()


def begin_step() -> None:
    """Count a step, and raise an error that is due; before anything of the step is sent."""
    global _begun
    with _changed:
        _begun += 1
        if _kept:
            _changed.wait_for(lambda: all(one.step is not None for one in _kept))
            _raise_first([one for one in _kept if (one.step or 0) <= _begun])


def raise_first() -> None:
    """Raise the first error that was kept, and forget all; not collective.

    For a place that all ranks pass after the ends of their threads.
    """
    with _changed:
        _raise_first(list(_kept))


def _raise_first(due: list[_BackgroundError]) -> None:
    _kept[:] = [one for one in _kept if one not in due]
    if not _kept:
        atexit.unregister(_end_with_error)
    if due:
        raise due[0].error


def _end_with_error() -> None:
    """End a process that no step has told of an error, with status 1."""
    for one in _kept:
        error = f"{type(one.error).__name__}: {one.error}"
        print(f"nxdpp: rank {os.environ.get('RANK', '0')}: error in the background: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
