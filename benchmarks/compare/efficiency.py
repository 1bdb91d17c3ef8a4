"""How far above its schedule's ideal a step is, where stages sleep."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.compare.contender import BY_HAND, PEER, US
from benchmarks.compare.field import Entry, run_field
from benchmarks.compare.job import Job
from benchmarks.compare.layers import SleepingLayer, wake_up_in_time
from benchmarks.compare.rows import Row, Verdict, measured_row, median
from benchmarks.compare.session import Effort
from benchmarks.compare.stacks import stack_job
from nxdpp.parallel_layers import parallel_state
from nxdpp.schedules.families.registry import FAMILIES, find_family
from nxdpp.schedules.simulate import simulate
from tests.support.run_ranks import run_ranks

SECTION = "efficiency"
RANKS = 4
HIDDEN = (4, 128, 256)
SLEEP_MS, LONG_SLEEP_MS = 5, 20
MICROBATCHES = (8, 16, 32)
PEER_SHARE, BY_HAND_SHARE, LONG_SHARE = 0.6, 1.1, 1.03


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """The rows of short sleeps for each number of microbatches, then those of long ones."""
    rows: list[Row] = []
    for sleep_ms, microbatches in [*((SLEEP_MS, m) for m in MICROBATCHES), (LONG_SLEEP_MS, MICROBATCHES[-1])]:
        case = f"{sleep_ms} ms, m={microbatches}"
        say(f"{SECTION}: {case}")
        entries = run_ranks(RANKS, run_rank, sleep_ms, microbatches, effort, timeout=time_limit(sleep_ms, effort))[0]
        rows += case_rows(case, sleep_ms, microbatches, entries)
    return rows


def time_limit(sleep_ms: int, effort: Effort) -> float:
    """Seconds that are more than enough."""
    return 120 + (effort.steps + effort.warm_up) * 10 * sleep_ms


def run_rank(rank: int, sleep_ms: int, microbatches: int, effort: Effort) -> list[Entry]:
    """One rank of a case."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    wake_up_in_time()
    return run_field(
        FAMILIES, partial(sleeping_job, sleep_ms, microbatches), partial(sleeping_job, 0, microbatches), effort
    )


def sleeping_job(sleep_ms: int, microbatches: int, chunks: int) -> Job:
    """One sleeping layer a stage."""
    return stack_job(partial(SleepingLayer, sleep_ms / 1000, HIDDEN[-1]), RANKS * chunks, HIDDEN, microbatches)


def ideal_ms(family: str, sleep_ms: int, microbatches: int) -> float:
    """A step's milliseconds if only sleeping took time."""
    schedule = find_family(family).build(RANKS, microbatches)
    return simulate(schedule, forward=sleep_ms, input_gradient=sleep_ms, weight_gradient=sleep_ms).makespan


def case_rows(case: str, sleep_ms: int, microbatches: int, entries: Sequence[Entry]) -> list[Row]:
    """Milliseconds above the ideal, beside the others of the same family."""
    excess = {
        (entry.name, entry.family): [
            1000 * wall - ideal_ms(entry.family, sleep_ms, microbatches) for wall in entry.times.wall
        ]
        for entry in entries
    }
    rows = []
    for entry in entries:
        values = excess[entry.name, entry.family]
        ideal = ideal_ms(entry.family, sleep_ms, microbatches)
        verdicts = []
        if entry.name == US:
            peer, by_hand = (excess.get((name, entry.family)) for name in (PEER, BY_HAND))
            asked = sleep_ms == SLEEP_MS
            if peer is not None:
                verdicts.append(Verdict(PEER, median(values) / median(peer), PEER_SHARE if asked else None))
            if by_hand is not None:
                verdicts.append(Verdict(BY_HAND, median(values) / median(by_hand), BY_HAND_SHARE if asked else None))
        share = 1 + median(values) / ideal
        asked_share = LONG_SHARE if entry.name == US and sleep_ms == LONG_SLEEP_MS else None
        verdicts.append(Verdict(f"the ideal {ideal:g} ms", share, asked_share))
        rows.append(measured_row(SECTION, case, entry.family, entry.name, "ms above ideal", values, verdicts))
    return rows
