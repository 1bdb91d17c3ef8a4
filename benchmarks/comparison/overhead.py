"""Microseconds a microbatch, with stages that compute next to nothing."""

from functools import partial

from benchmarks.comparison.contenders import BY_HAND, NXDPP, TORCH
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant, Row, case_rows
from benchmarks.comparison.stacks import ScalingLayer, stack_job
from benchmarks.comparison.timing import Effort, Times, time_families
from nxdpp.ranks import parallel_state
from nxdpp.schedules.families.registry import FAMILIES, find_family
from tests.support.run_ranks import run_ranks

SECTION = "overhead"
RANKS = (2, 4)
HIDDEN = (4, 128, 256)
MICROBATCHES = 32
STEPS_FACTOR = 4
"""Steps are short here, so that a median needs more of them."""


def measure(effort: Effort) -> list[Row]:
    """Wall time, then processor time of all ranks together, for each number of ranks."""
    rows: list[Row] = []
    effort = Effort(effort.warm_up * STEPS_FACTOR, effort.steps * STEPS_FACTOR)
    for ranks in RANKS:
        times = run_ranks(ranks, _run_rank, ranks, effort, timeout=180 + 5 * effort.steps)[0]
        for unit in ("wall", "CPU"):
            values = {
                entrant: [1e6 * seconds / MICROBATCHES for seconds in getattr(taken, unit.lower())]
                for entrant, taken in times.items()
            }
            case = f"p={ranks}, m={MICROBATCHES}, {unit}"
            rows += case_rows(SECTION, case, f"µs {unit} a microbatch", values, targets)
    return rows


def targets(contender: str, family: str) -> dict[Entrant, float | None]:
    """The highest allowed shares of the other contenders' times."""
    if contender != NXDPP:
        return {}
    if family == "1f1b":
        return {(BY_HAND, family): 1.1, (TORCH, family): 1.0}
    return {(TORCH, family): 0.6 if find_family(family).default_chunks == 2 else None}


def _run_rank(rank: int, ranks: int, effort: Effort) -> dict[Entrant, Times]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    job = partial(_light_job, ranks)
    return time_families(FAMILIES, job, job, effort)


def _light_job(ranks: int, chunks: int) -> Job:
    return stack_job(partial(ScalingLayer, HIDDEN[-1]), ranks * chunks, HIDDEN, MICROBATCHES)
