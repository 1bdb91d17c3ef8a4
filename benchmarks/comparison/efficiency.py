"""Milliseconds of a step above its schedule's ideal, with stages that sleep."""

from functools import partial
from statistics import median

from benchmarks.comparison.contenders import BY_HAND, NXDPP, TORCH
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant, Row, Verdict, case_rows
from benchmarks.comparison.stacks import SleepingLayer, end_sleeps_on_time, stack_job
from benchmarks.comparison.timing import Effort, Times, time_families
from nxdpp.ranks import parallel_state
from nxdpp.schedules.families.registry import FAMILIES, find_family
from nxdpp.schedules.simulate import simulate
from tests.support.run_ranks import run_ranks

SECTION = "efficiency"
RANKS = 4
HIDDEN = (4, 128, 256)
SHORT_MS, LONG_MS = 5, 20
CASES = ((SHORT_MS, 8), (SHORT_MS, 16), (SHORT_MS, 32), (LONG_MS, 32))
"""Milliseconds in which a rank sleeps in each part of a microbatch, and number of microbatches."""

TARGETS = {TORCH: 0.6, BY_HAND: None}
LONG_TARGET = 1.04
BEFORE_1F1B = ("interleaved", "zb-v")
"""Families whose step must end before 1F1B's."""


def measure(effort: Effort) -> list[Row]:
    """The rows of all cases."""
    rows: list[Row] = []
    for sleep_ms, microbatches in CASES:
        timeout = 120 + (effort.steps + effort.warm_up) * 10 * sleep_ms
        times = run_ranks(RANKS, _run_rank, sleep_ms, microbatches, effort, timeout=timeout)[0]
        rows += excess_rows(sleep_ms, microbatches, times)
    return rows


def sleeping_job(sleep_ms: int, microbatches: int, chunks: int) -> Job:
    """One sleeping layer a stage: a rank sleeps as long with several stages as with one."""
    seconds = sleep_ms / chunks / 1000
    return stack_job(partial(SleepingLayer, seconds, HIDDEN[-1]), RANKS * chunks, HIDDEN, microbatches)


def ideal_ms(family: str, sleep_ms: int, microbatches: int) -> float:
    """Milliseconds of a simulated step whose actions take only their sleeps and whose transfers take no time."""
    schedule = find_family(family).build(RANKS, microbatches)
    each = sleep_ms / find_family(family).default_chunks
    return simulate(schedule, forward=each, input_gradient=each, weight_gradient=each).makespan


def excess_rows(sleep_ms: int, microbatches: int, times: dict[Entrant, Times]) -> list[Row]:
    """Milliseconds above the ideal, compared within a family and with the ideal."""
    is_short = sleep_ms == SHORT_MS
    ideals = {family: ideal_ms(family, sleep_ms, microbatches) for _, family in times}
    excess = {
        (name, family): [1000 * wall - ideals[family] for wall in taken.wall] for (name, family), taken in times.items()
    }

    def others(contender: str, family: str) -> dict[Entrant, float | None]:
        compared = TARGETS if contender == NXDPP else {}
        return {(name, family): target if is_short else None for name, target in compared.items()}

    rows = case_rows(SECTION, f"{sleep_ms} ms, m={microbatches}", "ms above ideal", excess, others)
    for row in rows:
        ideal = ideals[row.family]
        target = LONG_TARGET if row.contender == NXDPP and not is_short else None
        row.verdicts.append(Verdict(f"the ideal {ideal:g} ms", 1 + median(row.values) / ideal, target))
        if row.contender == NXDPP and row.family in BEFORE_1F1B and (NXDPP, "1f1b") in times:
            step = 1000 * median(times[NXDPP, "1f1b"].wall)
            row.verdicts.append(Verdict(f"the step of 1f1b, {step:.0f} ms", (ideal + median(row.values)) / step, 1.0))
    return rows


def _run_rank(rank: int, sleep_ms: int, microbatches: int, effort: Effort) -> dict[Entrant, Times]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    end_sleeps_on_time()
    job, awake = (partial(sleeping_job, each, microbatches) for each in (sleep_ms, 0))
    return time_families(FAMILIES, job, awake, effort)
