"""The peak memory of each rank, where activations dominate."""

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.compare.alternation import timed_step
from benchmarks.compare.contender import US, Contender, check_step
from benchmarks.compare.field import makers
from benchmarks.compare.job import Job
from benchmarks.compare.layers import WideLayer
from benchmarks.compare.rows import Row, Verdict, measured_row
from benchmarks.compare.session import Effort
from benchmarks.compare.stacks import stack_job
from nxdpp.parallel_layers import parallel_state
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.simulate import live_peaks
from tests.support.run_ranks import run_ranks

SECTION = "memory"
RANKS = 4
LAYERS = 8
HIDDEN = (4, 128, 256)
MICROBATCHES = 16
FAMILIES = ("gpipe", "1f1b", "v-half")
MEBIBYTE = 2**20


class Peaks(NamedTuple):
    """Of one contender: MiB of each step on each rank."""

    name: str
    family: str
    ranks: list[list[float]]


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """A row for each rank of each contender."""
    say(SECTION)
    peaks = run_ranks(RANKS, run_rank, effort, timeout=300)[0]
    medians = {(p.name, p.family): [statistics.median(rank) for rank in p.ranks] for p in peaks}
    rows = []
    for rank in range(RANKS):
        case = f"rank {rank}, p={RANKS}, m={MICROBATCHES}"
        for found in peaks:
            beside = [(US, "gpipe")] if found.family != "gpipe" and found.name == US else []
            verdicts = [
                Verdict(f"{name} {family}", medians[found.name, found.family][rank] / medians[name, family][rank])
                for name, family in beside
                if (name, family) in medians
            ]
            rows.append(measured_row(SECTION, case, found.family, found.name, "MiB", found.ranks[rank], verdicts))
            held = live_peaks(find_family(found.family).build(RANKS, MICROBATCHES))[rank]
            rows[-1] = rows[-1].with_note(f"the schedule holds {held * activation_mib(found.family):.3g}")
    return rows


def run_rank(rank: int, effort: Effort) -> list[Peaks]:
    """One rank, contenders in turn."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    return_freed_memory()
    loss, gradients = wide_job().reference()
    contenders: list[Contender] = []
    names: list[tuple[str, str]] = []
    for family in FAMILIES:
        for name, make in makers(wide_job(), family, find_family(family).default_chunks):
            contenders.append(make())
            check_step(contenders[-1], loss, gradients)
            contenders[-1].forget_gradients()
            names.append((name, family))
    mine = [[peak_of_step(contender) for contender in contenders] for _ in range(effort.steps)]
    everybodys: list[list[list[float]]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(everybodys, mine)
    peaks = [[[step[index] for step in rank] for rank in everybodys] for index in range(len(contenders))]
    return [Peaks(*name, peak) for name, peak in zip(names, peaks, strict=True)]


def wide_job() -> Job:
    """Layers that keep much."""
    return stack_job(partial(WideLayer, HIDDEN[-1]), LAYERS, HIDDEN, MICROBATCHES)


def activation_mib(family: str) -> float:
    """What the layers of one stage keep of one microbatch: input, and twice its fourfold."""
    stages = RANKS * find_family(family).default_chunks
    elements = HIDDEN[0] * HIDDEN[1] * HIDDEN[2]
    return LAYERS / stages * 9 * elements * 4 / MEBIBYTE


def peak_of_step(contender: Contender) -> float:
    """MiB of resident memory that a step takes at its peak, above what was there before it."""
    contender.forget_gradients()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    timed_step(contender)
    return (_status("VmHWM") - before) / MEBIBYTE


def return_freed_memory() -> None:
    """Have glibc take large tensors from the system one by one, and give each back when it is freed."""
    mmap_threshold, trim_threshold = -3, -1
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 64 * 1024)
    libc.mallopt(trim_threshold, 64 * 1024)


def _status(name: str) -> int:
    """Bytes, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
