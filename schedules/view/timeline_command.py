"""``python -m nxdpp timeline``: a step as it was run, beside the simulated one with the measured times.

::

    python -m nxdpp timeline trace.json
    python -m nxdpp timeline trace.json --step 3
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.command import console
from nxdpp.schedules.view.measured_times import MeasuredTimes, measured_times
from nxdpp.schedules.view.recorded import RecordedStep, RecordedTimeline

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to those of ``python -m nxdpp``."""
    parser = commands.add_parser(
        "timeline",
        help="draw a step that was run, and where it lost its time",
        description="Draw a step from a trace that NxDPPModel(..., trace_file_path=FILE) wrote, and the same schedule "
        "simulated with the median times of each stage: as it would be if every microbatch took the same, and a rank "
        "lost no time between two actions.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the trace")
    parser.add_argument("--step", type=int, metavar="N", help="number of the step (the last whole one)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Do what ``options`` say; ``ValueError`` for those that cannot be honoured."""
    from nxdpp.schedules.view.drawing import draw

    recording = RecordedTimeline(options.file)
    step = recording.step(options.step)
    real, times = step.timeline, measured_times(step)
    ideal = times.simulate(step)
    out = console()
    out.print(f"{options.file} has {recording.describe()}. Times are milliseconds.")
    out.print(f"\n{step.name}, as it was: {_figures(real)}")
    out.print(draw(real, out.width))
    out.print(f"simulated: {_figures(ideal)}")
    out.print(draw(ideal, out.width, like=real))
    out.print(_ranks(step, real, ideal))
    out.print(_stages(times, step))
    lost = real.makespan - ideal.makespan
    share = f", {_percent(lost / real.makespan)} of the step" if real.makespan else ""
    figures = " - ".join(_milliseconds(timeline.makespan) for timeline in (real, ideal))
    out.print(f"lost: {figures} = {_milliseconds(lost)} ms{share}")


def _ranks(step: RecordedStep, real: Timeline, ideal: Timeline) -> "Table":
    """Where the time of each rank went."""
    from rich.table import Table

    table = Table(caption="sends: starting sends and receives; other: what is left of the makespan")
    for name in ("rank", "stages", "bubble", "simulated", "computed", "simulated", "waited", "sends", "other"):
        table.add_column(name, justify="right")
    for rank, spans in enumerate(real.spans):
        computed, waited, started = (1 - real.bubbles[rank]) * real.makespan, step.waited(rank), step.started(rank)
        figures = (
            computed, (1 - ideal.bubbles[rank]) * ideal.makespan, waited, started,
            real.makespan - computed - waited - started,
        )  # fmt: skip
        table.add_row(
            str(rank),
            ", ".join(map(str, sorted({span.action.stage for span in spans}))),
            _percent(real.bubbles[rank]),
            _percent(ideal.bubbles[rank]),
            *map(_milliseconds, figures),
        )
    return table


def _stages(times: MeasuredTimes, step: RecordedStep) -> "Table":
    """The times that were put into the simulator."""
    from rich.table import Table

    kinds = {span.action.kind.value for rank in step.ranks for span in rank.computes}
    names = {"F": "forward", "B": "backward", "I": "input-gradient", "W": "weight-gradient"}
    columns = {"forward": times.forward}
    if kinds & {"B", "I"}:
        columns["/".join(names[kind] for kind in "BI" if kind in kinds)] = times.input_gradient
    if "W" in kinds:
        columns["weight-gradient"] = times.weight_gradient
    columns["transfer to and from the next"] = times.transfer
    table = Table(caption="medians of the step, with which it is simulated")
    for name in ("stage", *columns):
        table.add_column(name, justify="right")
    for stage, figures in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(stage), *map(_milliseconds, figures))
    return table


def _figures(timeline: Timeline) -> str:
    return f"makespan {_milliseconds(timeline.makespan)}, bubble {_percent(timeline.mean_bubble)} on average"


def _milliseconds(time: float) -> str:
    # Stamps are nanoseconds; what is less came from adding them up.
    return f"{round(time, 6) + 0.0:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
