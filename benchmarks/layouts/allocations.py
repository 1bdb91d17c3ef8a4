"""Peak of the CPU memory that torch allocates in a block, by the events of its profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocated:
    """Bytes above the bytes before the block; earlier memory that is freed in the block does not count."""

    peak: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    """Measure the block, whose result is there at its end.

    The profiler sees one thread. Memory that gloo's thread has freed counts until its address is allocated again.
    """
    result = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield result
    kineto: Any = profiled.profiler
    events = sorted(_allocations(kineto.kineto_results.experimental_event_tree()), key=lambda event: event[0])
    result.peak = peak((address, size) for _, address, size in events)


def peak(events: Iterator[tuple[int, int]]) -> int:
    """Return the most bytes at once, from addresses and sizes in the order of time; a free has a size below 0."""
    sizes: dict[int, int] = {}
    now = most = 0
    for address, size in events:
        now -= sizes.pop(address, 0) if size > 0 else -size
        if size > 0:
            sizes[address] = size
            now += size
            most = max(most, now)
        else:
            sizes.pop(address, None)
    return most


def _allocations(events: Any) -> Iterator[tuple[int, int, int]]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)
