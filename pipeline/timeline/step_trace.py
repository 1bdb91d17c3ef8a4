"""Writing a trace of this rank's steps, all ranks of the pipeline into one file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.pipeline.timeline.chrome_trace import ChromeTrace, path_of_pipeline
from nxdpp.pipeline.timeline.clock_offset import offset_to_first
from nxdpp.pipeline.timeline.recorder import StepRecorder


class StepTrace:
    """The trace of the steps of one pipeline.

    At the start of a step all ranks measure how far their clocks are from rank 0's, at its end rank 0 gathers what they
    recorded and adds it to the file. A rank whose step fails adds what it has, if it can reach the file.

    Args:
        path: of the file; replicas other than the first write beside it.
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
        self._path = path_of_pipeline(path, pipeline)
        self._trace = ChromeTrace(self._path, pipeline, self._ranks)
        self._step = 0
        if self._rank == 0:
            self._trace.create()

    @contextmanager
    def step(self, device: torch.device, train: bool) -> Iterator[None]:
        """Record what happens inside, and write it; collective over the pipeline."""
        ahead = _reported(lambda: offset_to_first(self._group))
        words = f"{'train' if train else 'eval'}, {self._schedule}"
        self.recorder.begin(device)
        try:
            yield
        except BaseException as error:
            self._write_own(ahead, f"{words}, cut short", error)
            raise
        _reported(lambda: self._write(ahead, words))
        self._step += 1

    def _write(self, ahead: int, words: str) -> None:
        own = self.recorder.end(ahead)
        everybodys: list[Any] | None = [None] * self._ranks if self._rank == 0 else None
        dist.gather_object(own, everybodys, group=self._group, group_dst=0)
        if everybodys is not None:
            self._trace.append(self._step, words, dict(enumerate(everybodys)))

    def _write_own(self, ahead: int, words: str, error: BaseException) -> None:
        """What this rank did before ``error``."""
        try:
            self._trace.append(self._step, words, {self._rank: self.recorder.end(ahead)})
        except (OSError, RuntimeError) as problem:
            error.add_note(f"this step of rank {self._rank} is not in the trace {self._path}: {problem}")


def _reported(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; the other ranks are told of what it raises."""
    try:
        return call()
    except Exception as error:
        failure_watch.report(error)
        raise
