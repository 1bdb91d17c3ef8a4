"""Interface of a device, and the CPU as the device whose work is done when a call returns."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

# A time on the device: nanoseconds on the CPU, an event in the current stream on CUDA.
Stamp = Any


class Compilations(NamedTuple):
    """Graphs that this process has compiled so far, and the seconds that they took."""

    graphs: int = 0
    seconds: float = 0.0


class Work(NamedTuple):
    """Begin and end of work on the device, and of each compilation for it, in nanoseconds after an origin."""

    start: int
    end: int
    compilations: list[tuple[int, int]]


class Device:
    """A device of this rank.

    This class is the CPU. A subclass is a device with streams: its work starts in the order of the calls, and ends
    after they return.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def kind(self) -> str:
        """Words for devices; all ranks must have the same."""
        return self.device.type

    def stamp(self) -> Stamp:
        """Return the time at which the present work ends; does not wait for it."""
        return time.perf_counter_ns()

    def clock(self) -> Callable[[], Stamp]:
        """Return ``stamp`` as its cheapest call: on the CPU the function of Python itself."""
        return time.perf_counter_ns if type(self).stamp is Device.stamp else self.stamp

    def between(self, start: Stamp, end: Stamp) -> int:
        """Return the nanoseconds from one stamp to a later one; wait until the device has reached both."""
        return int(end - start)

    def origin(self) -> tuple[Stamp, int]:
        """Return a stamp and its ``time.perf_counter_ns``; wait until the device is idle."""
        stamp = self.stamp()
        return stamp, stamp

    def work(self, origin: Stamp, start: Stamp, end: Stamp) -> Work:
        """Return the work between two stamps; wait until the device has reached both."""
        return Work(self.between(origin, start), self.between(origin, end), [])

    def busy(self, step: tuple[Stamp, Stamp], blocks: Sequence[tuple[Stamp, Stamp]]) -> int:
        """Return the nanoseconds of a step in which the device computed; ``blocks`` are its calls, and may overlap."""
        total = reached = 0
        for start, end in sorted((self.between(step[0], a), self.between(step[0], b)) for a, b in blocks):
            total += max(end - max(start, reached), 0)
            reached = max(end, reached)
        return total

    def compiled(self) -> Compilations:
        """Return the compilations of this process so far; none where calls run at once."""
        return Compilations()

    def keep_graphs(self, folder: Path) -> None:
        """Keep compiled graphs in ``folder`` from one start to the next; a device that compiles none refuses it."""
        raise ValueError(f"compilation_cache={str(folder)!r}: {self.device} compiles no graphs. Leave it out.")

    def is_compiling(self) -> bool:
        """Return whether this process compiles a graph at this moment; any thread may ask."""
        return False

    @property
    def is_lazy(self) -> bool:
        """``True`` if operations are only recorded, and run at ``submit`` or when a value is needed."""
        return False

    @property
    def refuses_indices(self) -> bool:
        """``True`` if an index outside of a tensor is an error; else a value that is there is taken."""
        return True

    @property
    def runs_grouped_products(self) -> bool:
        """``True`` if the device runs ``torch.nn.functional.grouped_mm`` and what transformers computes for it."""
        return True

    def submit(self) -> None:
        """Start all recorded operations, and wait for none; does nothing on a device that records none.

        The random numbers that follow are the same as without it.
        """

    def expect_updates(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the graphs before the first change in place of ``tensors`` equal to the graphs after it."""

    def enter_thread(self) -> Callable[[], None]:
        """Return a call by which another thread gets the current device and stream of this one."""
        return lambda: None

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of a tensor in host memory."""
        return tensor.to(self.device)

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to copy a tensor of the device; the result waits for the copy, and returns it in host memory.

        The copy of a dense tensor has its strides.
        """
        copied = self.to_host_together([tensor])
        return lambda: copied()[0]

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or its copy in host memory on a device where each part to read would be a graph."""
        return tensor

    def to_host_together(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to copy tensors of the device, as ``to_host`` does; the result returns them in their order."""
        copies = [tensor.to("cpu") for tensor in tensors]
        return lambda: copies

    def fill(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Give ``tensor`` of the device the values of ``host``, which may be changed after the call."""
        tensor.copy_(host)

    def memory_of(self, tensor: torch.Tensor) -> int:
        """Return a number that tensors of one memory share; 0 for no memory."""
        return tensor.untyped_storage().data_ptr()

    def seed(self, number: int) -> None:
        """Seed the device's own random generator with ``number``, if ``torch.manual_seed`` does not do it."""

    def as_current(self) -> AbstractContextManager[Any]:
        """Make it the current device of a thread in the block."""
        return nullcontext()

    def random_state(self) -> bytes:
        """Return the state of the device's own random generator; the CPU's generator is torch's global one."""
        return b""

    def set_random_state(self, state: bytes) -> None:
        """Set the state that ``random_state`` returned."""

    def seeded_state(self, number: int) -> bytes:
        """Return the state of ``random_state`` that a seed of 64 bits gives; empty where there is none."""
        return b""
