"""Seconds of a step and peak memory of layouts, measured on processes of this machine."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.optim import AdamW, Optimizer

from benchmarks.layouts.allocations import allocated
from benchmarks.layouts.job import Shape
from benchmarks.planner.cores import stay_on_core
from nxdpp import NxDPPModel, apply_checkpoint, fully_shard, parallel_state
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.tensor.models.parallelize import tensor_parallelize

_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A layout, the names of the layers after which its model is cut, and the dtype of an autocast around its steps."""

    layout: Layout
    cuts: Sequence[str]
    autocast: torch.dtype | None = None


@dataclass
class Measured:
    """Figures of one rank.

    Attributes:
        stage: its rank in the pipeline.
        peak: most bytes of tensors at once in a step, including what it keeps between steps.
        seconds: of each step, from the start of all ranks to the end of this one.
    """

    stage: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


def measure_all(
    rank: int, cases: Sequence[Case], shape: Shape, rounds: int, steps: int, threads: int
) -> list[Measured]:
    """Measure all layouts in turn, ``rounds`` times, each second time in reverse order; for ``run_ranks``."""
    torch.set_num_threads(threads)
    if threads == 1:
        stay_on_core(rank, cases[0].layout.devices)
    found = [Measured() for _ in cases]
    for number in range(rounds):
        order = list(zip(cases, found, strict=True))
        for case, measured in order if number % 2 == 0 else reversed(order):
            _measure(case, shape, measured, steps, also_memory=number == 0)
    return found


def _measure(case: Case, shape: Shape, measured: Measured, steps: int, also_memory: bool) -> None:
    parallel_state.initialize_model_parallel(case.layout.tensor, case.layout.pipeline)
    measured.stage = parallel_state.get_pipeline_model_parallel_rank()
    seconds, peak = _train(case, shape, steps, also_memory)
    measured.seconds += seconds
    measured.peak = peak or measured.peak
    # Stages and optimizers are in reference cycles.
    gc.collect()
    parallel_state.destroy_model_parallel()


def _train(case: Case, shape: Shape, steps: int, also_memory: bool) -> tuple[list[float], int]:
    wrapped, optimizer = make(case, shape)
    inputs = _inputs(case.layout, shape)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", case.autocast, enabled=case.autocast is not None):
            wrapped.run_train(**inputs)
        optimizer.step()

    for _ in range(_WARM_UP):
        step()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    if not also_memory:
        return seconds, 0
    optimizer.zero_grad()
    kept = live_bytes()
    with allocated() as memory:
        step()
    return seconds, kept + memory.peak


def make(case: Case, shape: Shape) -> tuple[NxDPPModel, Optimizer]:
    """Return the wrapped model, and AdamW over its parameters, or over their shards."""
    layout = case.layout
    model = shape.model()
    if layout.tensor > 1:
        tensor_parallelize(model, sequence_parallel=layout.sequence)
    wrapped = NxDPPModel(
        model,
        num_microbatches=layout.microbatches(shape.microbatches),
        schedule=layout.schedule,
        virtual_pipeline_size=layout.chunks,
        pipeline_cuts=case.cuts,
        use_zero1_optimizer=layout.zero == 1,
    )
    if layout.checkpoint:
        apply_checkpoint(wrapped)
    if layout.is_sharded:
        fully_shard(wrapped, reshard_after_forward=layout.zero > SHARDED)
    if layout.zero == 1:
        return wrapped, Zero1Optimizer(wrapped.local_parameters(), AdamW, grad_clipping=False, lr=1e-3)
    return wrapped, AdamW(wrapped.local_parameters(), lr=1e-3)


def live_bytes() -> int:
    """Return the bytes of the memory of all tensors of this process."""
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in _TENSORS and not each.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _inputs(layout: Layout, shape: Shape) -> dict[str, torch.Tensor]:
    """Return this replica's rows of the step's batch."""
    inputs = shape.inputs(0)
    rows = shape.batch * shape.microbatches // layout.data
    first = parallel_state.get_data_parallel_rank() * rows
    return {name: value[first : first + rows] for name, value in inputs.items()}
