"""Contenders take turns, a step each, so that whatever else the machine does meets all of them alike."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.compare.contender import Contender
from benchmarks.compare.session import Effort

# From agreeing on a start until it: longer than it takes to tell all ranks.
_NOTICE_SECONDS = 0.01


@dataclass
class Times:
    """What a contender's steps took, all ranks together.

    Attributes:
        wall: seconds from the common start until the last rank is done, of each step.
        cpu: processor seconds of all ranks, of each step.
    """

    wall: list[float]
    cpu: list[float]


def take_turns(contenders: Sequence[Contender], effort: Effort) -> list[Times]:
    """The times of each contender; collective, and the same on all ranks.

    All ranks start a step at the same moment of the clock, which is common to the processes of a machine.
    """
    mine: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for contender in contenders:
        for _ in range(effort.warm_up):
            timed_step(contender)
    gc.collect()
    for _ in range(effort.steps):
        for contender, times in zip(contenders, mine, strict=True):
            times.append(timed_step(contender))
    everybodys: list[list[list[tuple[float, float]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybodys, mine)
    return [
        Times(
            wall=[max(wall for wall, _ in step) for step in zip(*ranks, strict=True)],
            cpu=[sum(cpu for _, cpu in step) for step in zip(*ranks, strict=True)],
        )
        for ranks in zip(*everybodys, strict=True)
    ]


def timed_step(contender: Contender) -> tuple[float, float]:
    """Seconds from the common start until this rank is done, and its processor seconds; collective."""
    contender.forget_gradients()
    start = agree_on_start()
    cpu = time.process_time()
    contender.step()
    return time.perf_counter() - start, time.process_time() - cpu


def agree_on_start() -> float:
    """Wait until all ranks are here and a moment that all know has come; that moment. Collective."""
    dist.barrier()
    start = torch.tensor([time.perf_counter() + _NOTICE_SECONDS], dtype=torch.float64)
    dist.broadcast(start, src=0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    return start.item()
