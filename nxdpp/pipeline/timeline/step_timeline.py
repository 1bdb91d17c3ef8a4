"""Timeline of this rank's steps: all ranks of a pipeline on one clock, in one file.

Events are recorded by calls and channels that take the place of the plain ones.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.devices.device import Stamp
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import gather_values
from nxdpp.schedules.actions import COMPUTE, TRANSFERS, Action, ActionKind
from nxdpp.schedules.timeline_file import Activity, Event, TimelineWriter

# Below the tag of the step verifier, above the tags of all other messages in the group.
_TAG = 2**31 - 2
_ROUND_TRIPS = 5
# Activations are sent for forwards, gradients for backwards.
_KINDS = {Direction.ACTIVATION: "F", Direction.GRADIENT: "B"}


class StepTimeline:
    """Writer of the steps of one pipeline; every rank has one.

    At the start of a step all ranks measure the offset of their clocks to rank 0's. At its end rank 0 gathers the
    events and adds them to the file. A rank whose step fails adds its own, if it can reach the file.

    Args:
        path: of the file; replicas other than the first write files next to it.
        schedule: its name.
    """

    def __init__(self, path: Path, schedule: str) -> None:
        self.recorder = StepRecorder()
        self._schedule = schedule
        self._group = parallel_state.get_pipeline_control_group()
        self._rank = dist.get_rank(self._group)
        self._ranks = dist.get_world_size(self._group)
        tensor = parallel_state.get_tensor_model_parallel_rank()
        pipeline = parallel_state.get_replica_rank() * parallel_state.get_tensor_model_parallel_size() + tensor
        self._file = TimelineWriter(path, pipeline, self._ranks)
        self._step = 0
        if self._rank == 0:
            self._file.create()

    @contextmanager
    def step(self, device: torch.device, train: bool, told: Callable[[], Mapping[str, Any]] = dict) -> Iterator[None]:
        """Record the block as a step and write it; collective over the pipeline.

        The step of a rank has what is ``told`` after a training step as arguments.
        """
        with failure_watch.reported():
            ahead = offset_to_first(self._group)
        description = f"{'train' if train else 'eval'}, {self._schedule}"
        self.recorder.begin(device)
        try:
            yield
        except BaseException as error:
            try:
                self._file.append(self._step, f"{description}, cut short", {self._rank: self.recorder.end(ahead)})
            except (OSError, RuntimeError) as problem:
                error.add_note(f"this step of rank {self._rank} is not in the timeline {self._file.path}: {problem}")
            raise
        with failure_watch.reported():
            own = self.recorder.end(ahead), dict(told()) if train else {}
            gathered = gather_values(own, self._group)
            if self._rank == 0:
                events, arguments = (dict(enumerate(each)) for each in zip(*gathered, strict=True))
                self._file.append(self._step, description, events, arguments)
        self._step += 1


def offset_to_first(group: dist.ProcessGroup) -> int:
    """Return how many nanoseconds rank 0's ``time.perf_counter_ns`` is ahead of this rank's; collective over ``group``.

    Each rank in turn asks rank 0 for its time, five times, and uses the quickest answer (Cristian, 1989).

    Args:
        group: takes CPU tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    message = torch.zeros(1, dtype=torch.int64, device="cpu")
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUND_TRIPS):
                with Wait("clocks", group, [other]):
                    group.recv([message], other, _TAG).wait()
                    message[0] = time.perf_counter_ns()
                    group.send([message], other, _TAG).wait()
        return 0
    answers = []
    for _ in range(_ROUND_TRIPS):
        asked = time.perf_counter_ns()
        with Wait("clocks", group, [0]):
            group.send([message], 0, _TAG).wait()
            group.recv([message], 0, _TAG).wait()
        answered = time.perf_counter_ns()
        answers.append((answered - asked, int(message), (asked + answered) // 2))
    return offset(*min(answers))


def offset(took: int, theirs: int, ours: int) -> int:
    """Return the offset from one answer that took ``took`` nanoseconds.

    ``theirs`` is the other clock in the answer, ``ours`` this clock in the middle of the round trip. An offset below
    half the round trip is 0: ranks on one machine share a clock.
    """
    ahead = theirs - ours
    return 0 if abs(ahead) <= took // 2 else ahead


class StepRecorder:
    """The events of this rank, one step at a time."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        # Of each thread: the two actions of a pair have one each.
        self._waited = threading.local()
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
            self._waited.end = end

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
        self._waited.end = None
        start = self._clock.stamp()
        try:
            call()
        finally:
            # Also where it fails: the timeline of a step that is cut short ends with this event.
            start = start if self._waited.end is None else self._waited.end
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
