"""Execution of a schedule by ranks that share cores: all that compute at once run slower.

With 4 ranks on 2 cores::

    ranks that compute      1    2    3     4
    speed of each           1    1    2/3   1/2

Transfers and waits take no core. With at least as many cores as ranks the times are as in ``execution``.
"""

from collections import deque
from heapq import heappop, heappush

from nxdpp.counted import counted
from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.execution import Times
from nxdpp.schedules.simulate import Span, Timeline, timeline_of

# The stage that computed it, whether by a forward, and the microbatch.
_Output = tuple[int, bool, int]


def shared_run(schedule: Schedule, times: Times, cores: float) -> Timeline:
    """Return the timeline of ``schedule`` by ranks that share ``cores``, the cores of all ranks of this pipeline.

    ``times`` are of each stage on a core of its own. Where n equal pipelines share a machine, each has 1/n of its
    cores. Raises ``ScheduleError`` for a schedule that cannot run, and ``ValueError`` if ``cores`` is not positive, or
    a list of ``times`` lacks one number for each stage.
    """
    if not cores > 0:
        raise ValueError(f"cores={cores} must be a number above 0.")
    sizes = check(schedule)
    for name, each in zip(Times._fields, times, strict=True):
        if len(each) != sizes.stages:
            raise ValueError(
                f"{name} has {counted(len(each), 'time')} for {counted(sizes.stages, 'stage')}. Give one for each "
                "stage."
            )
    return timeline_of(_SharedExecution(schedule, times, cores).run())


class _SharedExecution:
    """Processor sharing: all running actions advance at one speed, so they end in the order of a common clock."""

    def __init__(self, schedule: Schedule, times: Times, cores: float) -> None:
        self._schedule = schedule
        self._lengths = times.lengths
        self._transfer = times.transfer
        self._cores = cores
        self._rank_of = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
        self._spans: list[list[Span]] = [[] for _ in schedule]
        self._now = 0.0
        # Work that a rank which always ran would have done: it advances by time x speed.
        self._work = 0.0
        # (work at the end, rank, start) of running actions; (time, output) of transfers.
        self._running: list[tuple[float, int, float]] = []
        self._transfers: list[tuple[float, _Output]] = []
        # Outputs that their destination has, and the rank that waits for one.
        self._arrived: set[_Output] = set()
        self._waits: dict[_Output, int] = {}
        self._ready = deque(range(len(schedule)))

    def run(self) -> list[list[Span]]:
        while True:
            while self._ready:
                self._start(self._ready.popleft())
            if not self._running and not self._transfers:
                return self._spans
            speed = min(1.0, self._cores / len(self._running)) if self._running else 1.0
            end = self._now + (self._running[0][0] - self._work) / speed if self._running else float("inf")
            if self._transfers and self._transfers[0][0] <= end:
                time, output = heappop(self._transfers)
                self._work += (time - self._now) * speed
                self._now = time
                self._arrive(output)
            else:
                self._work, rank, start = heappop(self._running)
                self._now = end
                self._end(rank, start)

    def _start(self, rank: int) -> None:
        """Start the next action of ``rank``, or note what it waits for."""
        done = len(self._spans[rank])
        if done == len(self._schedule[rank]):
            return
        action = self._schedule[rank][done]
        needed = self._needed(action)
        if needed is not None and needed not in self._arrived:
            self._waits[needed] = rank
            return
        heappush(self._running, (self._work + self._lengths[action.kind][action.stage], rank, self._now))

    def _end(self, rank: int, start: float) -> None:
        stage, kind, microbatch, _ = action = self._schedule[rank][len(self._spans[rank])]
        self._spans[rank].append(Span(action, start, self._now))
        self._ready.append(rank)
        if kind is ActionKind.WEIGHT_GRADIENT:
            return
        forward = kind is ActionKind.FORWARD
        there = stage + 1 if forward else stage - 1
        if there not in self._rank_of:
            return
        output = (stage, forward, microbatch)
        if self._rank_of[there] == rank:
            self._arrive(output)
        else:
            heappush(self._transfers, (self._now + self._transfer[min(stage, there)], output))

    def _arrive(self, output: _Output) -> None:
        self._arrived.add(output)
        if (rank := self._waits.pop(output, None)) is not None:
            self._ready.append(rank)

    def _needed(self, action: Action) -> _Output | None:
        stage, kind, microbatch, _ = action
        if kind is ActionKind.FORWARD:
            return (stage - 1, True, microbatch) if stage else None
        if kind is ActionKind.WEIGHT_GRADIENT or stage + 1 not in self._rank_of:
            return None
        return stage + 1, False, microbatch
