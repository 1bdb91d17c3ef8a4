"""A forward and a backward of one rank that fill each other's waits for the tokens of experts.

Two threads take turns, and only one of them runs at a time::

    main thread    0DISPATCH5  0F5 ─ tokens leave ┐               ┌ tokens are there ─ ... ─ 0F5 ends  3B2  3COMBINE2
    other thread                                  └ 3B2 ─ leave ──┘ waits ...                          └─── 3B2 ends

A layer of experts calls ``hand_over`` after it has started to send tokens, and before it waits for those that come. So
the order of all exchanges of a rank follows from its actions, and not from any time: the ranks of an expert group run
the same actions, and make them in one order. The forward stays in the program's thread, which has its settings, such as
autocast. Layers that a backward computes again hand nothing over, since they restore random states.

After DualPipe (DeepSeek-AI, arXiv 2412.19437), which interleaves the parts of a forward and a backward by hand.
"""

from collections.abc import Callable
from threading import Semaphore, get_ident
from typing import ClassVar

import torch

from nxdpp.devices.daemon_thread import DaemonThread
from nxdpp.devices.device import Device
from nxdpp.pipeline.timeline.step_timeline import StepRecorder
from nxdpp.ranks.faults.board import NO_ACTION, board
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.timeline_file import Activity

# A backward that is told to end does so at once, unless it waits for a rank that is lost.
_SECONDS_TO_END = 1.0


def hand_over(kind: ActionKind, of_backward: bool) -> None:
    """Let the other action of the pair run, if there is one; this one is about to wait for tokens.

    Args:
        kind: ``DISPATCH`` or ``COMBINE``, the exchange.
        of_backward: ``True`` for gradients of tokens.

    Raises the error of the backward in the forward.
    """
    if OverlappedPair.present is not None:
        OverlappedPair.present.hand_over(kind, of_backward)


class _Turn:
    """One of the two actions: its thread runs while it has the turn."""

    def __init__(self, action: Action, at: int = NO_ACTION) -> None:
        self.action, self.at, self.thread = action, at, get_ident()
        self._given = Semaphore(0)

    def give(self) -> None:
        """Let the action run; the caller waits, or ends."""
        board.action, board.thread = self.at, self.thread
        self._given.release()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the action may run."""
        self._given.acquire(timeout=seconds)


class OverlappedPair:
    """The pair of actions that runs, one pair after the other.

    Attributes:
        present: the pair whose forward runs.
        failed: the backward, if its error has ended the forward.
    """

    present: ClassVar["OverlappedPair | None"] = None
    _thread: ClassVar[DaemonThread | None] = None

    def __init__(self, device: Device, recorder: StepRecorder | None) -> None:
        self._device, self._recorder = device, recorder
        self.failed: Action | None = None

    def open(self, first: Action, second: Action, second_at: int, call: Callable[[], None]) -> None:
        """Begin a pair: ``first`` comes next, and ``call`` runs ``second``, whose number on the board is given."""
        self._first, self._second, self._call = _Turn(first), _Turn(second, second_at), call
        self._has_begun = self._is_over = self._is_abandoned = False
        self._runs_second = False
        self._error: BaseException | None = None
        OverlappedPair.present = self

    def hand_over(self, kind: ActionKind, of_backward: bool) -> None:
        """Give the turn to the other action, until it hands over or ends."""
        if of_backward is not self._runs_second:
            return
        start = None if self._recorder is None else self._recorder.stamp()
        if of_backward:
            own = self._second
            self._runs_second = False
            self._first.give()
            own.wait()
            if self._is_abandoned:
                raise RuntimeError("the forward of the pair has failed")
        else:
            own = self._first
            own.at = board.action
            self._run_second()
            if self._error is not None:
                self.failed = self._second.action
                raise self._error
        if self._recorder is not None:
            self._recorder.add(Activity.EXCHANGE, kind.value, own.action.stage, own.action.microbatch, None, start)

    def finish(self) -> None:
        """Run what is left of the second action, after the first one. Raises its error."""
        OverlappedPair.present = None
        if self._has_begun:
            self._run_second()
        else:
            # The first one has exchanged no tokens.
            self._call()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the second action after an error."""
        if OverlappedPair.present is self:
            OverlappedPair.present = None
            if self._has_begun and not self._is_over:
                self._is_abandoned = True
                self._second.give()
                self._first.wait(_SECONDS_TO_END)

    def _run_second(self) -> None:
        if self._is_over:
            return
        self._runs_second = True
        if self._has_begun:
            self._second.give()
        else:
            self._has_begun = True
            if OverlappedPair._thread is None:
                OverlappedPair._thread = DaemonThread("backward of a pair")
            OverlappedPair._thread.submit(self._in_thread(self._device.enter_thread(), torch.get_default_device()))
        self._first.wait()

    def _in_thread(self, enter: Callable[[], None], default: torch.device) -> Callable[[], None]:
        first, second = self._first, self._second

        def run() -> None:
            try:
                enter()
                second.thread = get_ident()
                board.action, board.thread = second.at, second.thread
                if default.type == "cpu":
                    self._call()
                else:
                    with default:
                        self._call()
            except BaseException as error:
                self._error = error
            self._is_over, self._runs_second = True, False
            first.give()

        return run
