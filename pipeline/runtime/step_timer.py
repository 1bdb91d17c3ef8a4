"""How long a rank computed during a step."""

import time

import torch


class StepTimer:
    """Adds up the time spent in blocks ``with timer``; on CUDA, the device's own time between events."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._started = time.perf_counter()
        self._seconds = 0.0
        self._since = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._total = 0.0

    def __enter__(self) -> None:
        if self._on_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._events.append((start, end))
        else:
            self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._on_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._since

    def stop(self) -> None:
        """The step is over."""
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
        self._total = time.perf_counter() - self._started

    @property
    def busy_share(self) -> float:
        """Share of the step, between 0 and 1, in which this rank computed."""
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
        return min(1.0, seconds / self._total) if self._total else 0.0
