"""Peak memory of each rank in a step, with layers that keep much for their backward."""

import ctypes
from functools import partial

import torch.distributed as dist

from benchmarks.comparison.contenders import NXDPP, Contender, check_step, make_contenders
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant, Row, Verdict, case_rows
from benchmarks.comparison.stacks import WideLayer, stack_job
from benchmarks.comparison.timing import Effort, time_step
from nxdpp.ranks import parallel_state
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.simulate import in_flight_peaks
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks

SECTION = "memory"
RANKS = 4
LAYERS = 8
HIDDEN = (4, 128, 256)
MICROBATCHES = 16
FAMILIES = ("gpipe", "1f1b", "v-half")
MEBIBYTE = 2**20


def measure(effort: Effort) -> list[Row]:
    """A row for each rank of each contender."""
    of_ranks = run_ranks(RANKS, _run_rank, effort, timeout=300)
    rows: list[Row] = []
    for rank, peaks in enumerate(of_ranks):
        of_rank = case_rows(SECTION, f"rank {rank}, p={RANKS}, m={MICROBATCHES}", "MiB", peaks, _others)
        for row in of_rank:
            in_flight = in_flight_peaks(find_family(row.family).build(RANKS, MICROBATCHES))[rank]
            held = in_flight * _activation_mib(row.family)
            row.verdicts.append(Verdict(f"the schedule's {held:.3g} MiB", row.quartiles[1] / held))
        rows += of_rank
    return rows


def _run_rank(rank: int, effort: Effort) -> dict[Entrant, list[float]]:
    """MiB of each step on this rank; the contenders take turns."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    _return_freed_memory()
    job = stack_job(partial(WideLayer, HIDDEN[-1]), LAYERS, HIDDEN, MICROBATCHES)
    contenders = _checked_contenders(job)
    dist.barrier()
    peaks: dict[Entrant, list[float]] = {contender.entrant: [] for contender in contenders}
    for _ in range(effort.steps):
        for contender in contenders:
            peaks[contender.entrant].append(_peak_of_step(contender))
    return peaks


def _checked_contenders(job: Job) -> list[Contender]:
    loss, gradients = job.reference()
    contenders: list[Contender] = []
    for family in FAMILIES:
        for contender in make_contenders(job, family, find_family(family).default_chunks):
            check_step(contender, loss, gradients)
            contender.clear_gradients()
            contenders.append(contender)
    return contenders


def _others(contender: str, family: str) -> dict[Entrant, float | None]:
    return {(NXDPP, "gpipe"): None} if contender == NXDPP and family != "gpipe" else {}


def _activation_mib(family: str) -> float:
    """MiB that the layers of one stage keep of one microbatch: the input, and twice its fourfold."""
    stages = RANKS * find_family(family).default_chunks
    elements = HIDDEN[0] * HIDDEN[1] * HIDDEN[2]
    return LAYERS / stages * 9 * elements * 4 / MEBIBYTE


def _peak_of_step(contender: Contender) -> float:
    """MiB of resident memory at the peak of a step, above the memory before it."""
    contender.clear_gradients()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = resident_bytes()
    time_step(contender)
    return (peak_bytes() - before) / MEBIBYTE


def _return_freed_memory() -> None:
    """Have glibc take large tensors from the system one by one, and return each when it is freed."""
    mmap_threshold, trim_threshold = -3, -1
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 64 * 1024)
    libc.mallopt(trim_threshold, 64 * 1024)
