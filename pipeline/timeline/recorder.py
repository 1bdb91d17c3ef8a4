"""What one rank does in a step, and when: recorded by calls and channels that take the place of the plain ones."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.pipeline.timeline.clock import DeviceClock, Stamp
from nxdpp.schedules.actions import Action

# Activations travel for forwards, their gradients for backwards.
_KINDS = {Direction.ACTIVATION: "F", Direction.GRADIENT: "B"}


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


class StepRecorder:
    """Collects the events of this rank's steps, one step at a time."""

    def __init__(self) -> None:
        self._clock = DeviceClock(torch.device("cpu"))
        self._events: list[Event] = []
        self._began, self._began_at = self._clock.origin()
        self._waited: Stamp | None = None

    def begin(self, device: torch.device) -> None:
        """A step on ``device`` begins; what was recorded before is forgotten."""
        self._events.clear()
        self._clock = DeviceClock(device)
        self._began, self._began_at = self._clock.origin()

    def end(self, ahead: int) -> list[Event]:
        """The step itself, then its events; on a clock that is ``ahead`` nanoseconds ahead of this rank's."""
        ended = self._clock.stamp()
        events = [Event(What.STEP, "", 0, None, None, self._began, ended), *self._events]
        return [
            event._replace(start=self._at(event.start) + ahead, end=self._at(event.end) + ahead) for event in events
        ]

    def _at(self, stamp: Stamp) -> int:
        """This rank's ``time.perf_counter_ns`` at ``stamp``."""
        return self._began_at + self._clock.between(self._began, stamp)

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


class RecordedChannel(RemoteChannel):
    """A channel to another rank that records its sends, receives and waits."""

    def __init__(self, recorder: StepRecorder, *channel: Any) -> None:
        super().__init__(*channel)
        self._recorder = recorder

    def receive_metadata(self) -> None:
        """Recorded where the description is not known yet."""
        if not self.boundary.layouts:
            start = self._recorder.stamp()
            super().receive_metadata()
            self._recorder.add(What.WAIT_LAYOUTS, "", self.boundary.destination, None, self.boundary.source, start)

    def post_now(self, direction: Direction, microbatch: int) -> None:
        """Start to receive."""
        start = self._recorder.stamp()
        super().post_now(direction, microbatch)
        if self._entries(direction):
            here, there = self._ends(direction, sends=False)
            self._recorder.add(What.RECEIVE, _KINDS[direction], here, microbatch, there, start)

    def take(self, direction: Direction, microbatch: int) -> list[torch.Tensor]:
        """Wait for the tensors."""
        start = self._recorder.stamp()
        try:
            return super().take(direction, microbatch)
        finally:
            if self._entries(direction):
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
        at_source = sends == (direction is Direction.ACTIVATION)
        source, destination = self.boundary.source, self.boundary.destination
        return (source, destination) if at_source else (destination, source)
