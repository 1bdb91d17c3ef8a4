"""Parts of a step's time above its schedule's ideal: nxdpp, torch.distributed.pipelining and a loop by hand.

    python benchmarks/excess.py                            # the families that both have, 2 minutes
    python benchmarks/excess.py --only 1f1b --sleep 0      # stages of no work: all of the step

4 ranks, stages that sleep 5 ms in each part of a microbatch, 32 microbatches, as in ``compare.py --only efficiency``.
Each moment of a rank's main thread belongs to one kind: the stages' sleeps, waiting for messages, starting and taking
messages, and the rest (autograd and the runtimes' Python). From the sleeps go those of the schedule, from the waiting
goes the ideal's idle time. So the kinds of a row add up to its excess: microseconds of a microbatch, mean of the ranks.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch.distributed as dist  # noqa: E402
from torch.distributed.pipelining import schedules as torch_schedules  # noqa: E402

from benchmarks.comparison.contenders import TORCH_SCHEDULES, make_contenders  # noqa: E402
from benchmarks.comparison.efficiency import RANKS, ideal_ms, sleeping_job  # noqa: E402
from benchmarks.comparison.stacks import end_sleeps_on_time  # noqa: E402
from benchmarks.report import markdown_table, session_line  # noqa: E402
from nxdpp.ranks import parallel_state  # noqa: E402
from nxdpp.ranks.host_link import HostLink  # noqa: E402
from nxdpp.schedules.families.registry import find_family  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

MICROBATCHES = 32
SLEEPS, WAITING, MESSAGES, REST = "stages", "waiting", "messages", "rest"
KINDS = (SLEEPS, WAITING, MESSAGES, REST)
WARM_UP = 2

_Row = tuple[str, str, list[float]]


class Clock:
    """Seconds of a thread by kind: a call of one kind within another counts for its own."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._kind = REST
        self._since = time.perf_counter()
        self._thread = threading.get_ident()

    def enter(self, kind: str) -> str:
        """Let ``kind`` begin; return the kind before it."""
        now, before = time.perf_counter(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, whose time in this thread is of ``kind``."""

        @wraps(call, updated=())
        def counted(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*arguments, **keywords)
            before = self.enter(kind)
            try:
                return call(*arguments, **keywords)
            finally:
                self.enter(before)

        return counted


@contextmanager
def counted_calls(clock: Clock) -> Iterator[None]:
    """Let the calls that sleep, wait and send tell ``clock``."""
    calls: list[tuple[Any, str, str]] = [
        (time, "sleep", SLEEPS),
        (dist.Work, "wait", WAITING),
        (os, "read", WAITING),
        (HostLink, "send", MESSAGES),
        (HostLink, "receive", MESSAGES),
        (torch_schedules, "_batch_p2p", MESSAGES),
        (dist.ProcessGroup, "send", MESSAGES),
        (dist.ProcessGroup, "recv", MESSAGES),
    ]
    with ExitStack() as patches:
        for owner, name, kind in calls:
            patches.enter_context(mock.patch.object(owner, name, clock.timed(kind, getattr(owner, name))))
        yield


def main(arguments: list[str] | None = None) -> None:
    """Print the table of the families that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(TORCH_SCHEDULES), help="may be repeated")
    parser.add_argument("--sleep", type=int, default=5, metavar="MS", help="of a rank in a part of a microbatch")
    parser.add_argument("--steps", type=int, default=6, help=f"of each contender, after {WARM_UP}")
    asked = parser.parse_args(arguments)
    families = asked.only or list(TORCH_SCHEDULES)
    rows = run_ranks(RANKS, rows_of_rank, families, asked.sleep, asked.steps, timeout=600)[0]
    columns = ["schedule", "contender", *KINDS, "sum"]
    lines = [[family, name, *(f"{µs:,.0f}" for µs in [*kinds, sum(kinds)])] for family, name, kinds in rows]
    print(session_line())
    print(markdown_table(columns, lines, columns[:2]))


def rows_of_rank(rank: int, families: list[str], sleep_ms: int, steps: int) -> list[_Row]:
    """The family, the contender and its microseconds by kind, in turn; collective, and equal on all ranks."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    end_sleeps_on_time()
    rows = []
    for family in families:
        chunks = find_family(family).default_chunks
        contenders = list(make_contenders(sleeping_job(sleep_ms, MICROBATCHES, chunks), family, chunks))
        taken: list[list[dict[str, float]]] = [[] for _ in contenders]
        for step in range(WARM_UP + steps):
            for contender, times in zip(contenders, taken, strict=True):
                seconds = _step(contender)
                if step >= WARM_UP:
                    times.append(seconds)
        for contender, times in zip(contenders, taken, strict=True):
            own = {kind: statistics.median(seconds.get(kind, 0.0) for seconds in times) for kind in KINDS}
            rows.append((family, contender.entrant[0], _excess(own, family, sleep_ms)))
    return rows


def _step(contender: Any) -> dict[str, float]:
    """Seconds of a step by kind; what a rank waits for others at its end counts as waiting."""
    contender.clear_gradients()
    dist.barrier()
    clock = Clock()
    with counted_calls(clock):
        clock.enter(REST)
        contender.step()
        clock.enter(WAITING)
    dist.barrier()
    clock.enter(REST)
    return clock.seconds


def _excess(seconds: dict[str, float], family: str, sleep_ms: int) -> list[float]:
    """Microseconds of a microbatch above the ideal, by kind, as the mean of all ranks."""
    slept = 3 * sleep_ms * MICROBATCHES / 1000
    ideal = ideal_ms(family, sleep_ms, MICROBATCHES) / 1000
    own = [seconds[kind] - {SLEEPS: slept, WAITING: ideal - slept}.get(kind, 0.0) for kind in KINDS]
    everyone: list[list[float]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(everyone, own)
    return [1e6 * statistics.mean(kind) / MICROBATCHES for kind in zip(*everyone, strict=True)]


if __name__ == "__main__":
    main()
