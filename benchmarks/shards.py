"""Memory, bytes and step times of replicas, ZeRO-1 and shards, next to torch.distributed.pipelining with FSDP2.

    python benchmarks/shards.py                                # about 5 minutes on 2 cores
    python benchmarks/shards.py --hidden 512 --rounds 15
    python benchmarks/shards.py --hidden 256 --rounds 7 --write benchmarks/results/shards.md

Four ranks, two stages and two replicas, train a Llama with 1F1B, 8 microbatches and AdamW over gloo. ``state`` are the
bytes of a rank's parameters, gradients and optimizer state between steps, ``peak`` is the resident memory in a step
beyond them, and ``planned`` the same by ``nxdpp plan``. ``sent`` are the bytes that a rank sends to its replica in a
step. The ways take turns, step by step. Memory is measured in processes of its own, which return freed memory at once:
that takes time.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.fsdp import fully_shard as torch_fully_shard  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.optim import AdamW  # noqa: E402

import nxdpp  # noqa: E402
from benchmarks.comparison.job import Job  # noqa: E402
from benchmarks.comparison.llama import LlamaSize, llama_job  # noqa: E402
from benchmarks.layouts.traffic import Traffic  # noqa: E402
from benchmarks.page import write_blocks  # noqa: E402
from benchmarks.report import markdown_table, session_line  # noqa: E402
from nxdpp import NxDPPModel, fully_shard, parallel_state  # noqa: E402
from nxdpp.optimizer import Zero1Optimizer  # noqa: E402
from nxdpp.planning.layout import Layout  # noqa: E402
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

STAGES, RANKS = 2, 4
# By the stage of ZeRO.
OURS = ("replicas", "ZeRO-1", "fully_shard", "fully_shard, each microbatch")
WARM_UP = 2


class Way(NamedTuple):
    """One way: its step, which returns the loss, and a function that returns the bytes of its state."""

    step: Callable[[], float]
    state: Callable[[], int]


class Times(NamedTuple):
    """One way on one rank: seconds of each step, and the loss after the warm-up."""

    seconds: list[float]
    loss: float


class Bytes(NamedTuple):
    """One way on one rank: bytes of state, at the peak of a step beyond it, and sent in a step."""

    state: int
    peak: int
    sent: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table in Markdown; a failed rank raises with the output of every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="width of the Llama (512)")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="rounds of the steps (11)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table between its marks in this page")
    options = parser.parse_args(arguments)
    times = run_ranks(RANKS, _times, options.hidden, options.rounds, timeout=900.0)
    bytes_ = run_ranks(RANKS, _bytes, options.hidden, timeout=900.0)
    planned = _planned(options.hidden)
    rows = []
    first = 0.0
    for name in times[0]:
        seconds = [max(of_step) for of_step in zip(*(rank[name].seconds for rank in times), strict=True)]
        low, middle, high = statistics.quantiles(seconds, n=4)
        first = first or middle
        figures = [max(of_ranks) for of_ranks in zip(*(rank[name] for rank in bytes_), strict=True)]
        step = [f"{1e3 * middle:,.0f} ({1e3 * low:,.0f} to {1e3 * high:,.0f})", f"{middle / first:.2f}"]
        state, peak, sent = (f"{each / 1e6:,.1f}" for each in figures)
        plan = f"{planned[name] / 1e6:,.1f}" if name in planned else ""
        rows.append([name, state, peak, plan, sent, *step, f"{times[-1][name].loss:.6f}"])
    columns = ["way", "state, MB", "peak, MB", "planned, MB", "sent, MB", "step, ms", "of replicas", "loss"]
    table = f"{session_line()}\n\n{markdown_table(columns, rows, left=['way'])}"
    print(table)
    if options.write is not None:
        write_blocks(options.write, {"shards": table})


def _planned(hidden: int) -> dict[str, float]:
    """The peak of a step beyond the state, in bytes, as ``nxdpp plan`` has it."""
    job = llama_job(LlamaSize(hidden))
    rows = len(job.first_input) // job.microbatches
    found = nxdpp.plan(
        job.make_model(),
        devices=RANKS,
        device_memory="80GB",
        global_batch=RANKS // STAGES * len(job.first_input),
        device="cpu",
        inputs=lambda count: {name: each[:1].expand(count, -1).clone() for name, each in job.inputs.items()},
        layouts=[
            Layout(pipeline=STAGES, data=RANKS // STAGES, zero=zero, microbatch=rows) for zero in range(len(OURS))
        ],
    )
    # Buckets stay from step to step, as the state does.
    return {
        OURS[each.layout.zero]: max(
            rank.total - rank.weights - rank.gradients - rank.optimizer - rank.buckets for rank in each.memory
        )
        for each in found.best
    }


def _ways(hidden: int) -> dict[str, Way]:
    """The ways, each on a model of its own; the first is the one that others are compared with."""
    job = llama_job(LlamaSize(hidden))
    return {
        OURS[0]: _nxdpp(job),
        OURS[1]: _nxdpp(job, zero1=True),
        OURS[2]: _nxdpp(job, shard=True),
        OURS[3]: _nxdpp(job, shard=True, reshard_after_forward=True),
        "torch, FSDP2": _torch(job, reshard_after_forward=False),
        "torch, FSDP2, each microbatch": _torch(job, reshard_after_forward=True),
    }


def _times(rank: int, hidden: int, rounds: int) -> dict[str, Times]:
    """Measure steps of all ways on this rank, which takes them in turn."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    ways = _ways(hidden)
    loss = {name: [way.step() for _ in range(WARM_UP)][-1] for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(ways):
            dist.barrier()
            began = time.perf_counter()
            ways[name].step()
            seconds[name].append(time.perf_counter() - began)
    return {name: Times(seconds[name], loss[name]) for name in ways}


def _bytes(rank: int, hidden: int) -> dict[str, Bytes]:
    """Measure memory and messages of all ways on this rank, one after the other."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    _return_freed_memory()
    measured = {}
    for name, way in _ways(hidden).items():
        for _ in range(WARM_UP):
            way.step()
        with Traffic({}) as traffic:
            way.step()
        ctypes.CDLL(None).malloc_trim(0)
        dist.barrier()
        reset_peak()
        before = resident_bytes()
        way.step()
        measured[name] = Bytes(way.state(), peak_bytes() - before, int(sum(traffic.sent.values())))
    return measured


def _nxdpp(job: Job, zero1: bool = False, shard: bool = False, reshard_after_forward: bool | None = None) -> Way:
    model = NxDPPModel(job.make_model(), num_microbatches=job.microbatches, schedule="1f1b", use_zero1_optimizer=zero1)
    if shard:
        fully_shard(model, reshard_after_forward=reshard_after_forward)
    if zero1:
        optimizer: Any = Zero1Optimizer(list(model.local_parameters()), AdamW, lr=1e-3)
    else:
        optimizer = AdamW(model.local_parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = model.run_train(**job.inputs)
        optimizer.step()
        return loss.item() if isinstance(loss, torch.Tensor) else 0.0

    held = optimizer.base_optimizer if zero1 else optimizer
    return Way(step, lambda: _state(model.local_parameters(), held))


def _torch(job: Job, reshard_after_forward: bool) -> Way:
    """As torchtitan does it: each layer and each stage is a unit; parameters stay whole within a step by default."""
    mesh, device = parallel_state.get_device_mesh()["data"], torch.device("cpu")
    stage = parallel_state.get_pipeline_model_parallel_rank()
    module: Any = job.cut(job.make_model(), stage, STAGES)
    for layer in module.model.layers.values():
        torch_fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    torch_fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)
    group = parallel_state.get_pipeline_model_parallel_group()
    schedule = Schedule1F1B(
        PipelineStage(module, stage, STAGES, device, group=group), job.microbatches, loss_fn=job.loss
    )
    optimizer = AdamW(module.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (job.first_input,) if stage == 0 else ()
        target = job.target if stage == STAGES - 1 else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    return Way(step, lambda: _state(module.parameters(), optimizer))


def _state(parameters: Any, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    held = list(parameters)
    tensors = [*held, *(each.grad for each in held if each.grad is not None)]
    for values in optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def _return_freed_memory() -> None:
    """Have glibc take large tensors from the system one by one, and return each when it is freed."""
    mmap_threshold, trim_threshold = -3, -1
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 64 * 1024)
    libc.mallopt(trim_threshold, 64 * 1024)


if __name__ == "__main__":
    main()
