"""What one rank does in a step, and when: recorded by calls and links that take the place of the plain ones."""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from nxdpp.pipeline.p2p.link import RemoteLink
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.schedules.actions import Action

# Activations travel for forwards, their gradients for backwards.
_KINDS = {Direction.ACTIVATION: "F", Direction.GRADIENT: "B"}

# Nanoseconds, or on CUDA an event that gets them when the device comes to it.
Stamp = Any


class What(StrEnum):
    """What a rank was at; the value is the event's category in the trace."""

    STEP = "step"
    COMPUTE = "compute"
    WAIT = "wait"
    SEND = "send"
    RECEIVE = "receive"
    WAIT_SENT = "wait sent"
    WAIT_LAYOUTS = "wait layouts"


class Event(NamedTuple):
    """One thing that a rank did, from ``start`` to ``end``, in nanoseconds.

    ``kind`` is the letter of a compute action, or ``F`` for activations and ``B`` for gradients. ``other`` is the stage
    at the other end. A send or receive is the time that this rank spent to start it, not that of the transfer.
    """

    what: What
    kind: str
    stage: int
    microbatch: int | None
    other: int | None
    start: int
    end: int

    @property
    def name(self) -> str:
        """``F s2 mb5``, ``send F s2 mb5 to s3``, ``wait B s2 mb5 from s3``."""
        words = [] if self.what is What.COMPUTE else [self.what.value]
        words += [self.kind] if self.kind else []
        words.append(f"s{self.stage}")
        if self.microbatch is not None:
            words.append(f"mb{self.microbatch}")
        if self.other is not None:
            words.append(f"{'to' if self.what in (What.SEND, What.WAIT_SENT) else 'from'} s{self.other}")
        return " ".join(words)


class Clock:
    """Stamps of what runs on ``device``, which are this rank's ``time.perf_counter_ns`` once the step is over.

    On CUDA a stamp is an event in the current stream: there kernels, and the waits for what NCCL receives, run after
    the calls that ask for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.stamp: Callable[[], Stamp] = time.perf_counter_ns
        if device.type == "cuda":
            self.stamp = self._cuda_stamp
            torch.cuda.synchronize(device)
            self._origin = self._cuda_stamp()
            self._origin.synchronize()
        self._origin_nanoseconds = time.perf_counter_ns()

    def nanoseconds(self, stamp: Stamp) -> int:
        """When ``stamp`` was made; on CUDA waits until the device has come to it."""
        if isinstance(stamp, int):
            return stamp
        stamp.synchronize()
        return self._origin_nanoseconds + int(1e6 * self._origin.elapsed_time(stamp))

    @staticmethod
    def _cuda_stamp() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepRecorder:
    """Collects the events of this rank's steps, one step at a time."""

    def __init__(self) -> None:
        self._clock = Clock(torch.device("cpu"))
        self._events: list[Event] = []
        self._began: Stamp = 0
        self._waited: Stamp | None = None

    def begin(self, device: torch.device) -> None:
        """A step on ``device`` begins; what was recorded before is forgotten."""
        self._events.clear()
        self._clock = Clock(device)
        self._began = self._clock.stamp()

    def end(self, ahead: int) -> list[Event]:
        """The step itself, then its events; on a clock that is ``ahead`` nanoseconds ahead of this rank's."""
        ended = self._clock.stamp()
        events = [Event(What.STEP, "", 0, None, None, self._began, ended), *self._events]
        at = self._clock.nanoseconds
        return [event._replace(start=at(event.start) + ahead, end=at(event.end) + ahead) for event in events]

    def stamp(self) -> Stamp:
        """Now, or when the device comes to it."""
        return self._clock.stamp()

    def add(self, what: What, kind: str, stage: int, microbatch: int | None, other: int | None, start: Stamp) -> None:
        """Something is over that began at ``start``."""
        end = self._clock.stamp()
        self._events.append(Event(what, kind, stage, microbatch, other, start, end))
        if what is What.WAIT:
            self._waited = end

    def computing(self, action: Action, call: Callable[[], None]) -> Callable[[], None]:
        """``call``, which does the compute ``action``, recorded from the end of what it waits for."""
        kind, stage, microbatch = action.kind.value, action.stage, action.microbatch

        def recorded() -> None:
            self._waited = None
            start = self._clock.stamp()
            try:
                call()
            finally:
                # Also the one that failed, so that the trace of a step that is cut short ends with it.
                self.add(What.COMPUTE, kind, stage, microbatch, None, start if self._waited is None else self._waited)

        return recorded


class RecordedLink(RemoteLink):
    """A link to another rank that records its sends, receives and waits."""

    def __init__(self, recorder: StepRecorder, *link: Any) -> None:
        super().__init__(*link)
        self._recorder = recorder

    def learn(self) -> None:
        """Recorded where the description is not known yet."""
        if self.border.layouts is None:
            start = self._recorder.stamp()
            super().learn()
            self._recorder.add(What.WAIT_LAYOUTS, "", self.border.user, None, self.border.maker, start)

    def post_now(self, direction: Direction, microbatch: int) -> None:
        """Start to receive."""
        start = self._recorder.stamp()
        super().post_now(direction, microbatch)
        if self._crossings(direction):
            here, there = self._ends(direction, sends=False)
            self._recorder.add(What.RECEIVE, _KINDS[direction], here, microbatch, there, start)

    def take(self, direction: Direction, microbatch: int) -> list[torch.Tensor]:
        """Wait for the tensors."""
        start = self._recorder.stamp()
        try:
            return super().take(direction, microbatch)
        finally:
            if self._crossings(direction):
                here, there = self._ends(direction, sends=False)
                self._recorder.add(What.WAIT, _KINDS[direction], here, microbatch, there, start)

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send."""
        start = self._recorder.stamp()
        super().give(direction, microbatch, tensors)
        if tensors:
            here, there = self._ends(direction, sends=True)
            self._recorder.add(What.SEND, _KINDS[direction], here, microbatch, there, start)

    def release(self, direction: Direction, microbatch: int) -> None:
        """Wait for sends that are over, or have to be."""
        sent = bool(self._sent.get((direction, microbatch)))
        start = self._recorder.stamp()
        super().release(direction, microbatch)
        if sent:
            here, there = self._ends(direction, sends=True)
            self._recorder.add(What.WAIT_SENT, _KINDS[direction], here, microbatch, there, start)

    def _ends(self, direction: Direction, sends: bool) -> tuple[int, int]:
        """This rank's stage and the other one."""
        at_maker = sends == (direction is Direction.ACTIVATION)
        maker, user = self.border.maker, self.border.user
        return (maker, user) if at_maker else (user, maker)
