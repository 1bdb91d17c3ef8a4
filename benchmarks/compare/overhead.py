"""What a microbatch costs where stages compute next to nothing."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.compare.contender import BY_HAND, PEER, US
from benchmarks.compare.field import Entry, run_field
from benchmarks.compare.job import Job
from benchmarks.compare.layers import ScalingLayer
from benchmarks.compare.rows import Row, Verdict, measured_row, median
from benchmarks.compare.session import Effort
from benchmarks.compare.stacks import stack_job
from nxdpp.parallel_layers import parallel_state
from nxdpp.schedules.families.registry import FAMILIES, find_family
from tests.support.run_ranks import run_ranks

SECTION = "overhead"
RANKS = (2, 4)
HIDDEN = (4, 128, 256)
MICROBATCHES = 32
# Steps are short here, and the median of few is noise.
STEPS_FACTOR = 4


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """Wall time, then processor time, for each number of ranks."""
    rows: list[Row] = []
    effort = Effort(effort.warm_up * STEPS_FACTOR, effort.steps * STEPS_FACTOR)
    for ranks in RANKS:
        say(f"{SECTION}: {ranks} ranks")
        entries = run_ranks(ranks, run_rank, ranks, effort, timeout=180 + 5 * effort.steps)[0]
        for unit in ("wall", "CPU"):
            rows += case_rows(ranks, unit, entries)
    return rows


def run_rank(rank: int, ranks: int, effort: Effort) -> list[Entry]:
    """One rank of a case."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    job = partial(light_job, ranks)
    return run_field(FAMILIES, job, job, effort)


def light_job(ranks: int, chunks: int) -> Job:
    """One multiplication a stage."""
    return stack_job(partial(ScalingLayer, HIDDEN[-1]), ranks * chunks, HIDDEN, MICROBATCHES)


def case_rows(ranks: int, unit: str, entries: Sequence[Entry]) -> list[Row]:
    """Microseconds a microbatch; processor time is that of all ranks together."""
    case = f"p={ranks}, m={MICROBATCHES}, {unit}"
    found = {
        (entry.name, entry.family): [
            1e6 * seconds / MICROBATCHES for seconds in (entry.times.wall if unit == "wall" else entry.times.cpu)
        ]
        for entry in entries
    }
    rows = []
    for entry in entries:
        values = found[entry.name, entry.family]
        verdicts = [
            Verdict(name, median(values) / median(others), target)
            for name, target in targets(entry.family).items()
            if entry.name == US and (others := found.get((name, entry.family))) is not None
        ]
        rows.append(measured_row(SECTION, case, entry.family, entry.name, f"µs {unit} a microbatch", values, verdicts))
    return rows


def targets(family: str) -> dict[str, float | None]:
    """The most that this runtime may take, as a share of what each other takes."""
    if family == "1f1b":
        return {BY_HAND: 1.1, PEER: 1.0}
    return {PEER: 0.6 if find_family(family).default_chunks == 2 else None}
