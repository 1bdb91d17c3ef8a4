"""Figures of a run, and the table at its end: busy share, memory and traffic of each rank, time against the ideal."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from one_process import OneProcess
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from settings import Settings

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement.together import from_all_ranks
from nxdpp.devices.memory import peak_bytes
from nxdpp.schedules.actions import parse_action
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.simulate import Timeline, simulate

BUSY = "busy: share of run_train in which a rank computes; the rest is the bubble: waits for others, and transfers"
BUSY_ALONE = "busy: share of run_train in which the process computes the model"
BUSY_TENSOR = "the messages between tensor-parallel ranks count as busy"
SENT = "sent in a step: to other stages, without averages over replicas and messages of tensor-parallel ranks"
MEMORY = {"cuda": "peak memory: allocated on the device"}
MEMORY_OF_PROCESS = "peak memory: of the process, with its imports"


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank over the steps after the first; times are seconds, of ``actions`` by their text."""

    device: str
    stages: Sequence[int]
    steps: int
    busy: float
    peak_bytes: int
    sent_bytes: int
    step: float
    run_train: float
    actions: Mapping[str, float]


class StepFigures:
    """Figures of this rank's steps without the first one of this start, which makes connections and graphs."""

    def __init__(self, model: NxDPPModel) -> None:
        self._model = model
        self._stages = model.local_stages
        self._count = 0
        self._busy: list[float] = []
        self._run_train: list[float] = []
        self._steps: list[float] = []
        self._actions: dict[str, list[float]] = {}
        self._sent = 0
        self._last_end = time.perf_counter()

    def step_done(self) -> None:
        """Note the figures of a step that has ended; not collective."""
        model, now = self._model, time.perf_counter()
        if self._count:
            self._busy.append(model.last_busy_share)
            self._run_train.append(model.last_step_seconds)
            self._steps.append(now - self._last_end)
            self._sent = model.last_sent_bytes
            for action, seconds in model.last_action_seconds.items():
                self._actions.setdefault(action, []).append(seconds)
        self._count += 1
        self._last_end = now

    def saved(self) -> None:
        """Leave a save, from the end of the last step to now, out of the next step; not collective."""
        self._last_end = time.perf_counter()

    def of_all_ranks(self) -> list[RankFigures]:
        """Figures of each rank; collective over all ranks. Empty after fewer than two steps."""
        own = RankFigures(
            parallel_state.local_device().type,
            self._stages,
            len(self._steps),
            fmean(self._busy or [0.0]),
            peak_bytes(parallel_state.local_device()),
            self._sent,
            median(self._steps or [0.0]),
            median(self._run_train or [0.0]),
            {action: median(seconds) for action, seconds in self._actions.items()},
        )
        every = from_all_ranks(own)
        return every if own.steps else []


def ideal(settings: Settings, figures: Sequence[RankFigures]) -> Timeline | None:
    """Simulate a step with the measured times of the actions, without transfers; ``None`` where none are known."""
    lengths: dict[tuple[int, str], list[float]] = {}
    for rank in figures:
        for text, seconds in rank.actions.items():
            action = parse_action(text)
            lengths.setdefault((action.stage, action.kind.value), []).append(seconds)
    if not lengths:
        return None
    schedule = ChosenSchedule(
        settings.schedule,
        settings.pipeline_parallel_size,
        settings.num_microbatches,
        settings.virtual_pipeline_size,
    )
    stages = range(schedule.placement.stages)

    def times(kind: str, other: str = "") -> list[float]:
        both = [lengths.get((stage, kind)) or lengths.get((stage, other)) for stage in stages]
        return [median(each) if each else 0.0 for each in both]

    # The simulator adds both gradients of a full backward.
    return simulate(schedule.training, times("F"), times("I", "B"), times("W"))


def print_figures(
    console: Console, settings: Settings, figures: Sequence[RankFigures], one_process: OneProcess | None
) -> None:
    """Print the table of the ranks, and the time of a step next to the ideal and to one process."""
    has_pipeline = settings.pipeline_parallel_size > 1
    table = Table(title=f"Figures of {figures[0].steps} step(s), without the first")
    for heading in ("rank", "stages", "busy", "peak memory", *(["sent in a step"] if has_pipeline else [])):
        table.add_column(heading, justify="right", overflow="fold")
    for number, rank in enumerate(figures):
        cells = [str(number), ", ".join(map(str, rank.stages)), f"{rank.busy:.1%}", decimal(rank.peak_bytes)]
        table.add_row(*cells, *([decimal(rank.sent_bytes)] if has_pipeline else []))
    console.print(table)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(justify="right", no_wrap=True)
    lines.add_column(overflow="fold")
    for line in _lines(settings, figures, one_process):
        lines.add_row(*line)
    console.print(lines, highlight=False)
    console.print(BUSY if has_pipeline else BUSY_ALONE, highlight=False)
    if settings.tensor_parallel_size > 1:
        console.print(BUSY_TENSOR, highlight=False)
    console.print(MEMORY.get(figures[0].device, MEMORY_OF_PROCESS), highlight=False)
    if has_pipeline:
        console.print(SENT, highlight=False)


def _lines(
    settings: Settings, figures: Sequence[RankFigures], one_process: OneProcess | None
) -> Iterator[tuple[str, str, str]]:
    step, run_train = (max(getattr(rank, name) for rank in figures) for name in ("step", "run_train"))
    yield "step", _milliseconds(step), "median, with clipping, the optimizer and this report"
    timeline = ideal(settings, figures) if settings.pipeline_parallel_size > 1 else None
    times = f"{run_train / timeline.makespan:.2f} times the ideal" if timeline else "forwards and backwards"
    yield "run_train", _milliseconds(run_train), times
    if timeline:
        name = settings.schedule or ("interleaved" if settings.virtual_pipeline_size > 1 else "1f1b")
        said = f"{name}, simulated with the measured times of the actions, without transfers"
        yield "ideal", _milliseconds(timeline.makespan), said
        bubble = 1 - fmean(rank.busy for rank in figures)
        equal = simulate([[span.action for span in spans] for spans in timeline.spans]).mean_bubble
        said = f"mean of the ranks; {timeline.mean_bubble:.1%} in the ideal, {equal:.1%} if all stages were equal"
        yield "bubble", f"{bubble:.1%}", said
    if one_process is not None and one_process.step is None:
        yield "one process", "none", one_process.said
    elif one_process is not None and one_process.step is not None:
        of = f"of {len(figures)} processes" if len(figures) > 1 else "with nxdpp"
        ratio = f"{one_process.step / step:.2f} times the step {of}; {one_process.said}"
        yield "one process", _milliseconds(one_process.step), ratio


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
