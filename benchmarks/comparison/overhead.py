"""Microseconds a microbatch, with stages that compute next to nothing."""

from functools import partial

from benchmarks.comparison.contenders import BY_HAND, NXDPP, TORCH
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant, Row, case_rows
from benchmarks.comparison.stacks import ScalingLayer, stack_job
from benchmarks.comparison.timing import Effort, Times, time_families
from nxdpp.ranks import parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.run_ranks import run_ranks

SECTION = "overhead"
RANKS = (2, 4)
HIDDEN = (4, 128, 256)
MICROBATCHES = 32
STEPS_FACTOR = 4
"""Steps are short here, so that a median needs more of them."""
HALF_OF_TORCH = ("interleaved", "zb1p", "zb-v")
"""Families that may take half of torch's time."""


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
            rows += case_rows(SECTION, case, f"µs {unit} a microbatch", values, partial(targets, ranks, unit))
    return rows


def targets(ranks: int, unit: str, contender: str, family: str) -> dict[Entrant, float | None]:
    """The highest allowed shares of the other contenders' wall times; ``None`` is a comparison without a target."""
    if contender != NXDPP:
        return {}
    compared: dict[Entrant, float | None] = {(BY_HAND, family): None, (TORCH, family): None}
    if unit == "wall" and ranks == 2 and family == "1f1b":
        compared[TORCH, family] = 0.8
    if unit == "wall" and ranks == 4 and family == "1f1b":
        compared[BY_HAND, family] = 0.75
    if unit == "wall" and ranks == 4 and family in HALF_OF_TORCH:
        compared[TORCH, family] = 0.5
    return compared


def _run_rank(rank: int, ranks: int, effort: Effort) -> dict[Entrant, Times]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    job = partial(_light_job, ranks)
    return time_families(FAMILIES, job, job, effort)


def _light_job(ranks: int, chunks: int) -> Job:
    return stack_job(partial(ScalingLayer, HIDDEN[-1]), ranks * chunks, HIDDEN, MICROBATCHES)
