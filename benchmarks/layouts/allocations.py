"""Peak of the CPU memory that torch allocates in a block, exactly, by the events of its profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocated:
    """Bytes above those before the block; memory of before that is freed in the block does not count."""

    peak: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    """Measure the block, whose result is there at its end."""
    result = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield result
    kineto: Any = profiled.profiler
    now = 0
    for event in kineto.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            result.peak = max(result.peak, now)
