"""Recording of the events of this rank's steps, by calls and channels that take the place of the plain ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from nxdpp.devices.device import Stamp
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.schedules.actions import COMPUTE, TRANSFERS, Action, ActionKind
from nxdpp.schedules.timeline_file import Activity, Event

# Activations are sent for forwards, gradients for backwards.
_KINDS = {Direction.ACTIVATION: "F", Direction.GRADIENT: "B"}


class StepRecorder:
    """The events of this rank, one step at a time."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waited: Stamp | None = None
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Begin a step on ``device``; the events of the step before are dropped."""
        self._events.clear()
        self._clock = device_of(device)
        self._began, self._began_at = self._clock.origin()

    def end(self, ahead: int) -> list[Event]:
        """Return the step itself, then its events, on a clock that is ``ahead`` nanoseconds ahead of this rank's.

        A compute action has an event for each graph that was compiled for it. Other events may be in that time.
        """
        events = [Event(Activity.STEP, "", 0, None, None, self._began, self._clock.stamp()), *self._events]
        shift = self._began_at + ahead

        def at(stamp: Stamp) -> int:
            return shift + self._clock.between(self._began, stamp)

        placed = []
        for event in events:
            if event.activity is Activity.COMPUTE:
                work = self._clock.work(self._began, event.start, event.end)
                compiled = event._replace(activity=Activity.COMPILE)
                placed += [compiled._replace(start=shift + s, end=shift + e) for s, e in work.compilations]
                placed.append(event._replace(start=shift + work.start, end=shift + work.end))
            else:
                placed.append(event._replace(start=at(event.start), end=at(event.end)))
        return placed

    def stamp(self) -> Stamp:
        """Return the present time, on CUDA the time of the device's stream."""
        return self._clock.stamp()

    def add(
        self, activity: Activity, kind: str, stage: int, microbatch: int | None, other: int | None, start: Stamp
    ) -> None:
        """Add an event from ``start`` to now; see ``Event``."""
        end = self._clock.stamp()
        self._events.append(Event(activity, kind, stage, microbatch, other, start, end))
        if activity is Activity.WAIT:
            self._waited = end

    def record(self, action: Action, call: Callable[[], None]) -> None:
        """Make ``call``, which runs ``action``; a compute action is recorded from the end of its last wait."""
        if action.kind in TRANSFERS:
            call()
            return
        if action.kind is ActionKind.SUBMIT:
            call()
            # A lazy device compiles and computes here what the compute action before has recorded.
            self._events[-1] = self._events[-1]._replace(end=self._clock.stamp())
            return
        self._waited = None
        start = self._clock.stamp()
        try:
            call()
        finally:
            # Also where it fails: the timeline of a step that is cut short ends with this event.
            start = start if self._waited is None else self._waited
            activity = Activity.COMPUTE if action.kind in COMPUTE else Activity.EXCHANGE
            self.add(activity, action.kind.value, action.stage, action.microbatch, None, start)


class RecordedChannel(RemoteChannel):
    """A channel to another rank that records its sends, receives and waits."""

    def __init__(self, recorder: StepRecorder, *channel: Any) -> None:
        super().__init__(*channel)
        self._recorder = recorder

    def receive_metadata(self) -> None:
        """Record the wait for the metadata, in the first step."""
        if not self.boundary.layouts:
            start = self._recorder.stamp()
            super().receive_metadata()
            boundary = self.boundary
            self._recorder.add(Activity.WAIT_METADATA, "", boundary.destination, None, boundary.source, start)

    def post_now(self, direction: Direction, microbatch: int) -> None:
        """Record the start of a receive."""
        with self._recorded(Activity.RECEIVE, direction, microbatch):
            super().post_now(direction, microbatch)

    def take(self, direction: Direction, microbatch: int) -> list[torch.Tensor]:
        """Record the wait for the tensors."""
        with self._recorded(Activity.WAIT, direction, microbatch):
            return super().take(direction, microbatch)

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Record the start of a send."""
        with self._recorded(Activity.SEND, direction, microbatch):
            super().give(direction, microbatch, tensors)

    def release(self, direction: Direction, microbatch: int) -> None:
        """Record the wait for a send that is still held."""
        held = bool(self._sent.get((direction, microbatch)))
        with self._recorded(Activity.WAIT_SENT, direction, microbatch) if held else nullcontext():
            super().release(direction, microbatch)

    @contextmanager
    def _recorded(self, activity: Activity, direction: Direction, microbatch: int) -> Iterator[None]:
        """Record the block, where tensors are sent in ``direction``."""
        start = self._recorder.stamp()
        try:
            yield
        finally:
            if self._number((direction, microbatch)):
                source, destination = self.boundary.source, self.boundary.destination
                if direction is Direction.GRADIENT:
                    source, destination = destination, source
                sends = activity in (Activity.SEND, Activity.WAIT_SENT)
                here, there = (source, destination) if sends else (destination, source)
                self._recorder.add(activity, _KINDS[direction], here, microbatch, there, start)
