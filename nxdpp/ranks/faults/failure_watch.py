"""Failure watch: the failure of one rank ends all ranks, and its error is the last thing printed.

Each rank has a thread that polls the world's store for a failure, over its own connection. If rank 2 raises while the
others wait for its messages::

    rank 2   reports itself in the store    waits for answers      prints its error, exits 1
    others   find rank 2 there              print a line, answer   wait,             exit 1

Rank 2 keeps its connections until all ranks have answered. Otherwise an error "connection closed" of another rank could
be printed before its own. Every wait has a limit. At most about seven seconds pass from the first failure to the last
exit, mostly less than one.
"""

import multiprocessing.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.ending_process import sentence_of, tell_launcher
from nxdpp.ranks.faults.mistakes import add_note
from nxdpp.ranks.faults.rank_watch import RankWatch
from nxdpp.ranks.faults.timeouts import NO_LIMITS, Timeouts

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_watch: RankWatch | None = None
# Our hook of uncaught exceptions; None before the first start.
_installed: _Hook | None = None
# The first error of a step of this rank, and the call that it ended.
_failure: tuple[BaseException, str] | None = None


def start(store: Store, timeouts: Timeouts = NO_LIMITS) -> None:
    """Start the watch of the default process group; collective over all ranks.

    ``initialize_model_parallel`` calls it, with the ``store`` of this start and the ``timeouts`` of a job that does not
    move.
    """
    global _watch, _failure
    if _watch is not None:
        _watch.leave()
    _failure = None
    board.reset()
    _watch = RankWatch(store, timeouts)
    _install()


def stop() -> None:
    """End the watch on this rank; all ranks must call it. ``destroy_model_parallel`` does.

    The watch continues while an exception passes (``try: train() finally: destroy_model_parallel()``). The exception
    is then reported where it ends the process. It also continues after a failure that the program has caught: other
    ranks may wait in the failed call, and end because of it.
    """
    global _watch
    if _failure is not None and _active() is not None:
        report(_failure[0])
    elif _watch is not None and sys.exception() is None:
        _watch.leave()
        _watch = None


def report(error: BaseException) -> None:
    """Make all other ranks stop because of ``error``; not collective, and without a watch it does nothing.

    If this rank is the first to fail, the function returns. Let ``error`` propagate: it is then printed and ends the
    process. A program that catches ``error`` is on its own: its next step raises, see ``refuse_after_failure``. Its
    process ends with status 1. If another rank failed first, this process prints one line and exits with status 1.
    """
    _remember(error)
    watch = _active()
    if watch is not None:
        watch.report(error)


@contextmanager
def reported() -> Iterator[None]:
    """Report an exception of the block, and let it propagate.

    Another ``BaseException``, such as ``KeyboardInterrupt``, is reported if the program continues.
    """
    try:
        yield
    except Exception as error:
        report(error)
        raise
    except BaseException as error:
        _remember(error)
        raise


def refuse_after_failure() -> None:
    """Raise ``RuntimeError`` if a step or another collective call of this rank has failed; at the start of each call.

    Other ranks may still wait in the failed call. A later call must not take their messages for its own. A fork of
    a rank is refused too: it has no connections of its own.
    """
    if _watch is not None and _watch.process != os.getpid():
        raise RuntimeError(
            "this process is a fork of a rank (os.fork, or a worker of a DataLoader), and other ranks know nothing of "
            "it. Make collective calls in the process that called initialize_model_parallel."
        )
    if _failure is None or _active() is None:
        return
    error, call = _failure
    text = f"{type(error).__name__}: {str(error).rstrip('.')}"
    reported_error = RuntimeError(
        f"{call} has failed on this rank, and its error was caught: {text}. The ranks are no longer in step, and the "
        f"others end. Let the error end the program, and start it again from a checkpoint."
    )
    report(error)
    raise reported_error from error


def _remember(error: BaseException) -> None:
    global _failure
    if _failure is None and _active() is not None:
        position = board.position()
        _failure = error, position.call or "a collective call"


def _install() -> None:
    """Make the ends of this process known to the present watch: once, however often a program starts."""
    global _installed
    if _installed is None:
        # Unlike atexit, this also runs at the end of a multiprocessing child.
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
    if _installed is None or sys.excepthook is not _installed:
        sys.excepthook = _installed = _hook(sys.excepthook)


def _hook(previous: _Hook) -> _Hook:
    """Exception hook that reports an uncaught exception before the previous hook prints it."""

    def report_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch = _active()
        if watch is not None and watch.report(error):
            add_note(error)
            tell_launcher(sentence_of(error))
            watch.end_process(lambda: previous(kind, error, trace))
        previous(kind, error, trace)

    return report_and_print


def _active() -> RankWatch | None:
    """The watch, unless it has ended or a fork inherited it."""
    return _watch if _watch is not None and _watch.is_active() else None


def _at_exit() -> None:
    """Leave the watch at the end of the process, or report an exception that the hook has not seen.

    That is the exception that ends a multiprocessing child, or one that another hook printed.
    """
    watch = _active()
    if watch is None:
        return
    passing = sys.exception()
    error = passing or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        if _failure is None or not watch.owns_failure:
            if board.interrupted:
                watch.report_exit(board.interrupted)
            else:
                watch.leave()
            return
        # The program caught the error that ends the other ranks.
        passing = error = _failure[0]
    elif isinstance(passing, SystemExit) and passing.__context__ is not None:
        # torch.multiprocessing ends a child by SystemExit, while it handles the child's error.
        passing = error = passing.__context__

    def print_error() -> None:
        if passing is not None:
            traceback.print_exception(passing)

    if watch.report(error):
        add_note(error)
        tell_launcher(sentence_of(error))
        watch.end_process(print_error)
