"""Times of the graphs that an XLA device compiles and runs, from torch_xla's metrics.

torch_xla counts a graph when it is looked up, and notes its time when it has run. So a mark is a time of the host and
the number of graphs so far, and the end of the last of them is known once the device has run it::

    host      mark ── forward is recorded ── start ── mark ── ...
    device         ───── graph 6 ─────▶     ───── graph 7 ─────▶
    marks     graphs: 6                             graphs: 7

A device runs one graph at a time: a graph begins when the one before it has ended.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

Samples = tuple[int, list[tuple[float, float]]]
"""Number of graphs so far, and the latest of them: end in seconds since the epoch, and nanoseconds that it took."""

# torch_xla keeps the latest 1024 times of each kind.
_MOST_UNREAD = 500
# Of a step; times of earlier steps are dropped.
_MOST_KEPT = 2**15


class Mark(NamedTuple):
    """A time of the host, in nanoseconds, and the graphs that were looked up and compiled until then."""

    at: int
    graphs: int
    compiled: int


class ClockInterval(NamedTuple):
    """Begin and end on the clock ``time.perf_counter_ns``."""

    start: int
    end: int


class Spans:
    """The times of all graphs of one kind, in order.

    Attributes:
        count: number of graphs whose times are known.
    """

    def __init__(self, samples: Callable[[], Samples]) -> None:
        self.count = 0
        self._samples = samples
        self._read = 0
        self._spans: dict[int, ClockInterval] = {}
        self._last_end = 0

    def collect(self) -> None:
        """Read the times of the graphs that have ended since the last call."""
        # Between the two clocks.
        ahead = time.time_ns() - time.perf_counter_ns()
        count, latest = self._samples()
        # Metrics that the user has cleared begin anew.
        new = count - self._read if count >= self._read else count
        self._read = count
        self.count += new
        fresh = latest[len(latest) - min(new, len(latest)) :]
        for number, (ended, took) in enumerate(fresh, self.count - len(fresh) + 1):
            end = round(1e9 * ended) - ahead
            start = min(max(end - round(took), self._last_end), end)
            self._spans[number] = ClockInterval(start, end)
            self._spans.pop(number - _MOST_KEPT, None)
            self._last_end = end

    def of(self, first: int, last: int) -> list[ClockInterval]:
        """Return the known times of the graphs ``first`` to ``last``."""
        return [self._spans[number] for number in range(first, last + 1) if number in self._spans]


class GraphTimes:
    """Times of the graphs of this process.

    Args:
        counter: gives a counter of torch_xla.
        samples: gives a metric of torch_xla.
        wait: waits until the device has run all graphs.
    """

    def __init__(
        self, counter: Callable[[str], int], samples: Callable[[str], Samples], wait: Callable[[], object]
    ) -> None:
        self._counter = counter
        self._samples = samples
        self._wait = wait
        self._runs = Spans(lambda: samples("ExecuteTime"))
        self._compilations = Spans(lambda: samples("CompileTime"))
        # A mark and the times have different numbers after a graph that failed, and after cleared metrics.
        self._runs_ahead = self._compilations_ahead = 0
        self._latest = Mark(0, 0, 0)
        self._failed = self._looked_up = 0

    def mark(self) -> Mark:
        """Return the present mark; waits for nothing."""
        compiled = self._counter("UncachedCompile")
        mark = Mark(time.perf_counter_ns(), compiled + self._counter("CachedCompile"), compiled)
        if mark.graphs < self._latest.graphs:
            # The user has cleared the metrics.
            self._runs_ahead += self._latest.graphs
            self._compilations_ahead += self._latest.compiled
        self._latest = mark
        if mark.graphs + self._runs_ahead - self._runs.count > _MOST_UNREAD:
            self._runs.collect()
        return mark

    def end(self, mark: Mark) -> int:
        """Wait for the graphs until ``mark``; return the time at which they had run, but not one before the mark."""
        self._reach(mark)
        number = mark.graphs + self._runs_ahead
        return max([mark.at, *(span.end for span in self._runs.of(number, number))])

    def runs(self, start: Mark, end: Mark) -> list[ClockInterval]:
        """Return the times of the graphs between two marks; wait until the device has run them."""
        self._reach(end)
        return self._runs.of(start.graphs + self._runs_ahead + 1, end.graphs + self._runs_ahead)

    def compilations(self, start: Mark, end: Mark) -> list[ClockInterval]:
        """Return the times of the compilations between two marks; wait until the device has run their graphs."""
        self._reach(end)
        ahead = self._compilations_ahead
        return self._compilations.of(start.compiled + ahead + 1, end.compiled + ahead)

    def is_compiling(self) -> bool:
        """Return whether a graph is compiled at this moment; another thread asks."""
        return self._unfinished() > self._failed

    def settle(self) -> bool:
        """Note that no graph is compiled at this moment: graphs without a time have failed.

        Returns whether a graph was compiled since the last call.
        """
        looked_up = self._counter("UncachedCompile")
        is_new = looked_up != self._looked_up
        if is_new:
            self._looked_up = looked_up
            self._failed = self._unfinished()
        return is_new

    def _unfinished(self) -> int:
        return self._counter("UncachedCompile") - self._samples("CompileTime")[0]

    def _reach(self, mark: Mark) -> None:
        """Know the times of the graphs until ``mark``."""
        if mark.graphs + self._runs_ahead <= self._runs.count:
            if mark.compiled + self._compilations_ahead > self._compilations.count:
                self._compilations.collect()
            return
        self._runs.collect()
        self._compilations.collect()
        if mark.graphs + self._runs_ahead > self._runs.count:
            self._wait()
            self._runs.collect()
            now = self.mark()
            self._runs_ahead = self._runs.count - now.graphs
            self._compilations_ahead = self._compilations.count - now.compiled
