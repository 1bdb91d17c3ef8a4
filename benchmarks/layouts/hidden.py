"""Time of the data-parallel average that a step hides, for nxdpp and DDP.

::

    at the end    ─ forward and backward ─────────────────┤─ average ──────┤
    overlapped    ─ forward and backward ──────────────────────┤           ┊
                             ─ average ────────────────────────────┤       ┊
                                                                   ├───────┤  hidden time

The hidden share is this time over the time of the average by itself. The three are timed in turn.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison.stacks import SleepingLayer, Stack, end_sleeps_on_time
from benchmarks.layouts.job import Shape
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.average import bucket_allreduce_gradients

WARM_UP = 2
_MEBIBYTE = 2**20


class Sleepers(NamedTuple):
    """A stack of ``layers`` that sleep in place of computing, as if a device computed; each has ``width`` weights.

    The forward and each of the two gradients of a layer sleep ``seconds``. A microbatch is ``(1, width)``.
    """

    layers: int = 16
    width: int = 2 * _MEBIBYTE
    seconds: float = 0.01
    microbatches: int = 2

    def model(self) -> nn.Module:
        """Return the model, with the same values on each rank."""
        torch.manual_seed(0)
        return Stack([SleepingLayer(self.seconds, self.width) for _ in range(self.layers)], self.width)

    def inputs(self, replica: int) -> dict[str, torch.Tensor]:
        """Return a step's batch, the same for every replica."""
        return {"x": torch.ones(self.microbatches, self.width)}


class Case(NamedTuple):
    """A model whose gradients are averaged over two replicas, each of ``stages`` ranks."""

    name: str
    model: Shape | Sleepers
    stages: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return 2 * self.stages


@dataclass
class Steps:
    """Seconds of each round on one rank, of one contender.

    Attributes:
        overlapped, at_end: of a step whose average overlaps, and of a step that averages at its end.
        alone: of the average by itself.
        cpu: processor seconds of all threads of this rank in the average by itself.
        gradients: bytes.
        early: share of the bytes whose average began before the end of the last backward; ``None`` for DDP.
        waited: seconds between the end of the backward and the end of the average; none for DDP.
    """

    overlapped: list[float] = field(default_factory=list)
    at_end: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    gradients: int = 0
    early: float | None = None
    waited: list[float] = field(default_factory=list)


class Summary(NamedTuple):
    """Medians over the rounds of the slower rank; ``share`` has the quartiles of the hidden share.

    ``cpu`` is the processor time of a rank over the time of the average by itself.
    """

    overlapped: float
    at_end: float
    alone: float
    cpu: float
    share: tuple[float, float, float]
    waited: float | None


def time_average(rank: int, case: Case, rounds: int) -> dict[str, Steps]:
    """Time each contender in turn, with the order reversed in each second round; for ``run_ranks``."""
    torch.set_num_threads(1)
    end_sleeps_on_time()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.stages)
    contenders = {"nxdpp": _nxdpp(case)}
    if case.stages == 1:
        contenders["DDP"] = _ddp(case)
    results = {name: Steps() for name in contenders}
    for number in range(-WARM_UP, rounds):
        for name in list(contenders) if number % 2 else reversed(contenders):
            _round(contenders[name], results[name], number)
    parallel_state.destroy_model_parallel()
    return results


def summary(ranks: Sequence[Steps]) -> Summary:
    """Return the medians of the slower rank."""
    overlapped, at_end, alone = (
        [max(each) for each in zip(*(getattr(steps, name) for steps in ranks), strict=True)]
        for name in ("overlapped", "at_end", "alone")
    )
    shares = [(end - over) / only for over, end, only in zip(overlapped, at_end, alone, strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
    waited = [max(each) for each in zip(*(steps.waited for steps in ranks), strict=True)]
    cpu = statistics.median(sum(each) / len(ranks) for each in zip(*(steps.cpu for steps in ranks), strict=True))
    return Summary(
        statistics.median(overlapped),
        statistics.median(at_end),
        statistics.median(alone),
        cpu / statistics.median(alone),
        (low, middle, high),
        statistics.median(waited) if waited else None,
    )


@dataclass(frozen=True)
class _Contender:
    """A model, its step inside a context, and its context without an average."""

    model: nn.Module
    step: Callable[[], None]
    no_sync: Callable[[], AbstractContextManager[None]]

    def at_end(self) -> None:
        """Run a step, then average."""
        with self.no_sync():
            self.step()
        self.average()

    def average(self) -> None:
        """Average the gradients."""
        bucket_allreduce_gradients([p.grad for p in self.model.parameters() if p.grad is not None])


def _round(contender: _Contender, results: Steps, number: int) -> None:
    steps = [(contender.step, results.overlapped), (contender.at_end, results.at_end)]
    for run, seconds in steps if number % 2 else reversed(steps):
        contender.model.zero_grad()
        elapsed = _seconds(run)
        if number >= 0:
            seconds.append(elapsed)
        if run is contender.step and isinstance(contender.model, NxDPPModel):
            report = contender.model.last_average
            results.early = report.early_share
            if number >= 0:
                results.waited.append(report.wait_seconds)
    processor = time.process_time()
    elapsed = _seconds(contender.average)
    if number >= 0:
        results.alone.append(elapsed)
        results.cpu.append(time.process_time() - processor)
    results.gradients = sum(p.grad.nbytes for p in contender.model.parameters() if p.grad is not None)


def _seconds(run: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    elapsed = time.perf_counter() - began
    dist.barrier()
    return elapsed


def _nxdpp(case: Case) -> _Contender:
    layer = SleepingLayer if isinstance(case.model, Sleepers) else None
    wrapped = NxDPPModel(case.model.model(), layer, num_microbatches=case.model.microbatches)
    inputs = case.model.inputs(parallel_state.get_data_parallel_rank())

    def step() -> None:
        wrapped.run_train(**inputs)

    return _Contender(wrapped, step, wrapped.no_sync)


def _ddp(case: Case) -> _Contender:
    model = DistributedDataParallel(case.model.model())
    inputs = case.model.inputs(parallel_state.get_data_parallel_rank())
    parts = [value.chunk(case.model.microbatches) for value in inputs.values()]
    microbatches = [dict(zip(inputs, each, strict=True)) for each in zip(*parts, strict=True)]

    def step() -> None:
        for number, microbatch in enumerate(microbatches, 1):
            with nullcontext() if number == len(microbatches) else model.no_sync():
                output: Any = model(**microbatch)
                loss = output if isinstance(output, torch.Tensor) else output.loss
                (loss / len(microbatches)).backward()

    return _Contender(model, step, model.no_sync)
