"""``python -m nxdpp timeline``: a recorded step and its simulation with the measured times.

::

    python -m nxdpp timeline trace.json
    python -m nxdpp timeline trace.json --step 3 --svg step3.svg
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nxdpp.schedules.execution import Times
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.axis import Axis
from nxdpp.schedules.view.output import add_flags, check_flags, console, write_svg
from nxdpp.schedules.view.recorded import RecordedStep, RecordedTimeline
from nxdpp.schedules.view.report import stages_of
from nxdpp.schedules.view.tables import tables

if TYPE_CHECKING:
    from rich.table import Table

_AXIS = Axis("ms", "time: milliseconds from the first action", " ms")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m nxdpp``."""
    parser = commands.add_parser(
        "timeline",
        help="draw a recorded step and show its lost time",
        description="Draw a step from a file that NxDPPModel(..., trace_file_path=FILE) wrote, and the same schedule "
        "simulated with the median times of each stage: every microbatch then takes the same time, and a rank loses "
        "no time between two actions.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the timeline file")
    parser.add_argument("--step", type=int, metavar="N", help="number of the step (the last complete one that trained)")
    add_flags(parser, "both timelines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the drawings and tables for ``options``; ``ValueError`` for a file or step that cannot be shown."""
    from nxdpp.schedules.view.drawing import draw

    check_flags(options)
    recorded = RecordedTimeline(options.file)
    step = recorded.step(options.step)
    real, times = step.timeline, step.measured_times()
    ideal = simulate(step.schedule, *times)
    marks = {
        kind: [step.intervals(rank, of_waits=kind == "wait") for rank in range(len(step.ranks))]
        for kind in ("wait", "send")
    }
    timelines = {"measured": real, "simulated with the median times of each stage": ideal}
    write_svg(options, step.name, timelines, _AXIS, {"measured": marks})
    out = console(options.width)
    # A path is not broken at the width of the terminal.
    out.print(f"{options.file} has {recorded.describe()}. Times are milliseconds.", soft_wrap=True)
    out.print(f"\n{step.name}, measured: {_figures(real)}")
    out.print(draw(real, out.width, axis=_AXIS), soft_wrap=True)
    out.print(f"simulated: {_figures(ideal)}")
    out.print(draw(ideal, out.width, axis=_AXIS, like=real), soft_wrap=True)
    out.print(*_ranks(step, real, ideal, out.width), sep="\n")
    out.print("sim.: simulated; sends: calls that start transfers; other: the rest")
    out.print(*_stages(times, step, out.width), sep="\n")
    out.print("medians of the step, used in the simulation")
    lost = real.makespan - ideal.makespan
    share = f", {_percent(lost / real.makespan)} of the step" if real.makespan else ""
    figures = " - ".join(_milliseconds(timeline.makespan) for timeline in (real, ideal))
    out.print(f"lost: {figures} = {_milliseconds(lost)} ms{share}")


def _ranks(step: RecordedStep, real: Timeline, ideal: Timeline, width: int) -> "list[Table]":
    """The time of each rank by activity."""
    rows = []
    for rank, spans in enumerate(real.spans):
        computed, simulated = (timeline.makespan * (1 - timeline.bubbles[rank]) for timeline in (real, ideal))
        waited, started = step.waited(rank), step.started(rank)
        times = (computed, simulated, waited, started, real.makespan - computed - waited - started)
        bubbles = (_percent(real.bubbles[rank]), _percent(ideal.bubbles[rank]))
        rows.append([str(rank), stages_of(spans), *bubbles, *map(_milliseconds, times)])
    heads = ("rank", "stages", "bubble", "sim. bubble", "computed", "sim. time", "waited", "sends", "other")
    return tables(heads, rows, width)


def _stages(times: Times, step: RecordedStep, width: int) -> "list[Table]":
    """The times of each stage in the simulation."""
    kinds = {action.kind.value for actions in step.schedule for action in actions}
    backwards = "/".join(name for kind, name in (("B", "backward"), ("I", "input-gradient")) if kind in kinds)
    columns = {
        "forward": times.forward,
        backwards: times.input_gradient,
        "weight-gradient" if "W" in kinds else "": times.weight_gradient,
        "transfer to and from the next": times.transfer,
    }
    columns.pop("", None)
    rows = [[str(stage), *map(_milliseconds, each)] for stage, each in enumerate(zip(*columns.values(), strict=True))]
    return tables(("stage", *columns), rows, width)


def _figures(timeline: Timeline) -> str:
    return f"makespan {_milliseconds(timeline.makespan)}, bubble {_percent(timeline.mean_bubble)} on average"


def _milliseconds(time: float) -> str:
    # Rounded to nanoseconds, the unit of the file; the sum with 0.0 turns -0.0 into 0.0.
    rounded = round(time, 6) + 0.0
    return f"{rounded:.0f}" if abs(rounded) >= 1000 else f"{rounded:.4g}"


def _percent(share: float) -> str:
    # No -0.0 for a time that is off in its last digits.
    return f"{round(100 * share, 1) + 0.0:.1f} %"
