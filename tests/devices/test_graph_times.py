"""Times of an XLA device's graphs, from metrics that a test writes."""

import time
from collections import defaultdict

import pytest

from nxdpp.devices.graph_times import ClockInterval, GraphTimes, Samples

# Of the clock since the epoch.
_AHEAD = 5_000_000


class Metrics:
    """Counters and times as torch_xla has them, and a device that runs what was started when the host waits."""

    def __init__(self) -> None:
        self.now = 0
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.pending: list[tuple[int, int]] = []
        self.waits = 0

    def samples(self, name: str) -> Samples:
        return len(self.times[name]), self.times[name][-1024:]

    def wait(self) -> None:
        self.waits += 1
        for began, ended in self.pending:
            self.times["ExecuteTime"].append(((ended + _AHEAD) / 1e9, ended - began))
            self.now = max(self.now, ended)
        self.pending.clear()

    def run(self, began: int, ended: int) -> None:
        self.counters["CachedCompile"] += 1
        self.pending.append((began, ended))

    def compile(self, nanoseconds: int, began: int, ended: int) -> None:
        self.counters["UncachedCompile"] += 1
        self.now += nanoseconds
        self.times["CompileTime"].append(((self.now + _AHEAD) / 1e9, nanoseconds))
        self.pending.append((began, ended))


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    made = Metrics()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: made.now)
    monkeypatch.setattr(time, "time_ns", lambda: made.now + _AHEAD)
    return made


def _times(metrics: Metrics) -> GraphTimes:
    return GraphTimes(metrics.counters.__getitem__, metrics.samples, metrics.wait)


def test_a_mark_ends_with_the_graphs_before_it_and_not_before_its_own_time(metrics: Metrics) -> None:
    times = _times(metrics)
    start = times.mark()
    metrics.run(10, 40)
    metrics.now = 20
    during = times.mark()
    metrics.now = 70
    after = times.mark()

    assert (times.end(start), times.end(during), times.end(after)) == (0, 40, 70)
    assert times.runs(start, during) == [ClockInterval(10, 40)]
    assert times.runs(during, after) == []
    assert metrics.waits == 1


def test_a_graph_begins_when_the_one_before_it_has_ended(metrics: Metrics) -> None:
    times = _times(metrics)
    start = times.mark()
    # Both were started at once: the second one's time includes that of the first.
    metrics.run(0, 30)
    metrics.run(1, 50)
    assert times.runs(start, times.mark()) == [ClockInterval(0, 30), ClockInterval(30, 50)]


def test_a_graph_that_failed_does_not_shift_the_later_ones(metrics: Metrics) -> None:
    times = _times(metrics)
    metrics.counters["UncachedCompile"] += 1
    times.end(times.mark())
    start = times.mark()
    metrics.run(10, 20)
    assert times.runs(start, times.mark()) == [ClockInterval(10, 20)]
