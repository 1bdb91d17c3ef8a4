"""Timeline of this rank's steps: all ranks of a pipeline on one clock, in one file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from nxdpp.pipeline.timeline.recorder import StepRecorder
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import gather_values
from nxdpp.schedules.timeline_file import TimelineWriter

# Below the tag of the step verifier, above the tags of all other messages in the group.
_TAG = 2**31 - 2
_ROUND_TRIPS = 5


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
        pipeline = parallel_state.get_data_parallel_rank() * parallel_state.get_tensor_model_parallel_size() + tensor
        self._file = TimelineWriter(path, pipeline, self._ranks)
        self._step = 0
        if self._rank == 0:
            self._file.create()

    @contextmanager
    def step(self, device: torch.device, train: bool) -> Iterator[None]:
        """Record the block as a step and write it; collective over the pipeline."""
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
            gathered = gather_values(self.recorder.end(ahead), self._group)
            if self._rank == 0:
                self._file.append(self._step, description, dict(enumerate(gathered)))
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
