"""The clock of a device: stamps, and the share of a step in which a rank computed."""

import time
from collections.abc import Callable
from typing import Any

import torch

# Nanoseconds; on CUDA an event that gets its time when the device reaches it.
Stamp = Any


class DeviceClock:
    """Times of work on ``device``.

    On CUDA a stamp is an event in the current stream. Kernels, and the waits for NCCL's receives, run after the calls
    that start them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stamp: Callable[[], Stamp] = _cuda_stamp if device.type == "cuda" else time.perf_counter_ns

    def between(self, start: Stamp, end: Stamp) -> int:
        """Nanoseconds from one stamp to a later one; on CUDA wait until the device has reached the later one."""
        if isinstance(start, int):
            return int(end - start)
        end.synchronize()
        return int(1e6 * start.elapsed_time(end))

    def origin(self) -> tuple[Stamp, int]:
        """A stamp with its ``time.perf_counter_ns``; on CUDA wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        stamp = self.stamp()
        if isinstance(stamp, int):
            return stamp, stamp
        stamp.synchronize()
        return stamp, time.perf_counter_ns()


class StepTimer:
    """Time that a rank spends in blocks ``with timer``, as a share of the step."""

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._on_cuda = device.type == "cuda"
        self._blocks: list[tuple[Stamp, Stamp]] = []
        self._since: Stamp = 0
        self._started = self._ended = 0

    def start(self) -> None:
        """Begin a step."""
        self._blocks.clear()
        self._started = self._ended = time.perf_counter_ns()

    def stop(self) -> None:
        """End the step; on CUDA wait until the current stream is idle."""
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
        self._ended = time.perf_counter_ns()

    def __enter__(self) -> None:
        self._since = self._clock.stamp()

    def __exit__(self, *_: object) -> None:
        self._blocks.append((self._since, self._clock.stamp()))

    @property
    def busy_share(self) -> float:
        """Share of the step, between 0 and 1, in which this rank computed."""
        total = self._ended - self._started
        return min(1.0, sum(self._clock.between(*block) for block in self._blocks) / total) if total else 0.0


def _cuda_stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
