"""Timing of contenders in alternation: one step each in turn, so that other load on the machine affects all alike."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.comparison.contenders import Contender, check_step, make_contenders
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant
from nxdpp.schedules.families.registry import find_family

_NOTICE_SECONDS = 0.01
"""Time between the agreement on a start and the start: longer than a broadcast to all ranks."""


class Effort(NamedTuple):
    """Steps of each contender before and during the measurement."""

    warm_up: int
    steps: int


class Times(NamedTuple):
    """Seconds of each step: until the last rank is done, and processor time of all ranks together."""

    wall: list[float]
    cpu: list[float]


def time_families(
    families: Iterable[str], make_job: Callable[[int], Job], check_job: Callable[[int], Job], effort: Effort
) -> dict[Entrant, Times]:
    """Verify all contenders of the families against one process, then time them. Collective, equal on all ranks.

    Args:
        families: schedule families.
        make_job: returns the measured job for a number of stages a rank.
        check_job: returns a job with the same gradients for the one process; it need not sleep.
        effort: number of steps.

    Raises:
        AssertionError: if the loss or a gradient of a contender differs from one process.
    """
    contenders: list[Contender] = []
    for family in families:
        chunks = find_family(family).default_chunks
        loss, gradients = check_job(chunks).reference()
        for contender in make_contenders(make_job(chunks), family, chunks):
            check_step(contender, loss, gradients)
            contenders.append(contender)
    return time_contenders(contenders, effort)


def time_contenders(contenders: Sequence[Contender], effort: Effort) -> dict[Entrant, Times]:
    """Times of each contender. Collective, and equal on all ranks."""
    mine: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for contender in contenders:
        for _ in range(effort.warm_up):
            time_step(contender)
    gc.collect()
    for _ in range(effort.steps):
        for contender, times in zip(contenders, mine, strict=True):
            times.append(time_step(contender))
    gathered: list[list[list[tuple[float, float]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return {
        contender.entrant: Times(
            wall=[max(wall for wall, _ in step) for step in zip(*ranks, strict=True)],
            cpu=[sum(cpu for _, cpu in step) for step in zip(*ranks, strict=True)],
        )
        for contender, ranks in zip(contenders, zip(*gathered, strict=True), strict=True)
    }


def time_step(contender: Contender) -> tuple[float, float]:
    """Seconds from the common start until this rank is done, and its processor seconds. Collective."""
    contender.clear_gradients()
    start = _agree_on_start()
    cpu = time.process_time()
    contender.step()
    return time.perf_counter() - start, time.process_time() - cpu


def _agree_on_start() -> float:
    """Wait for all ranks, then until a common moment of the machine's clock; return that moment."""
    dist.barrier()
    start = torch.tensor([time.perf_counter() + _NOTICE_SECONDS], dtype=torch.float64)
    dist.broadcast(start, src=0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    return start.item()
