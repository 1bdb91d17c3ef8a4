"""``python -m nxdpp schedule``: drawing, bubble and memory of a simulated schedule.

::

    python -m nxdpp schedule zb-v --ranks 4 --microbatches 8
    python -m nxdpp schedule mine.csv --transfer 0.5
    python -m nxdpp schedule 1f1b --ranks 4 --microbatches 8 --zero 2 --exchange 1.5
    python -m nxdpp schedule --compare --ranks 8 --microbatches 32
"""

import argparse
import json
import math
from pathlib import Path

from nxdpp.counted import counted
from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.families.registry import FAMILIES, find_family
from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.axis import number
from nxdpp.schedules.view.output import COLUMNS, console, tell_size, whole_number
from nxdpp.schedules.view.report import Shares, as_json, compare, comparison_as_json, comparison_tables, rank_tables
from nxdpp.schedules.written import read_schedule

# Microbatches times stages. A drawing of so many takes about a quarter of a minute.
_MOST = 2**18
_FEWEST_COLUMNS = 40


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m nxdpp``."""
    parser = commands.add_parser(
        "schedule",
        help="draw a schedule with the bubble and memory of its ranks",
        description="Draw a schedule with the bubble and memory of its ranks. Times are those of all layers of a rank "
        "for one microbatch, in any unit: with v chunks per rank, a chunk takes 1/v of them.",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help=f"{', '.join(FAMILIES)}, or a CSV file of actions, one row per rank"
    )
    parser.add_argument("--ranks", type=whole_number, metavar="N", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=whole_number, metavar="N", help="microbatches of a step")
    parser.add_argument("--virtual", type=whole_number, metavar="N", help="chunks per rank (default of the family)")
    parser.add_argument("--forward", type=_time, default=1.0, metavar="T", help="time of a forward (1)")
    parser.add_argument("--input-gradient", type=_time, default=1.0, metavar="T", help="of an input-gradient (1)")
    parser.add_argument("--weight-gradient", type=_time, default=1.0, metavar="T", help="of a weight-gradient (1)")
    parser.add_argument("--transfer", type=_time, default=0.0, metavar="T", help="from one rank to another (0)")
    parser.add_argument("--exchange", type=_time, default=0.0, metavar="T", help="of replicas for all layers (0)")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO of an --exchange (0)")
    parser.add_argument(
        "--width",
        type=int,
        metavar="N",
        help=f"columns of drawings and tables, {_FEWEST_COLUMNS} at least (those of the terminal; {COLUMNS} for a "
        "file or pipe)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the timeline into this SVG file")
    parser.add_argument("--json", action="store_true", help="print actions and times as JSON in place of a drawing")
    parser.add_argument("--compare", action="store_true", help="print one line for each family in place of a drawing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the drawing, JSON or comparison for ``options``; ``ValueError`` for options that exclude each other."""
    if options.width is not None and options.width < _FEWEST_COLUMNS:
        raise ValueError(f"--width {options.width} must be {_FEWEST_COLUMNS} or more.")
    if options.json and options.width is not None:
        raise ValueError("--width is the width of a drawing: leave out --json, or --width.")
    if options.zero and not options.exchange:
        raise ValueError(f"--zero {options.zero} tells what --exchange takes the time of: add --exchange T.")
    if options.compare:
        _compare(options)
        return
    if options.name is None:
        raise ValueError(f"name a schedule, one of {', '.join(FAMILIES)} or a CSV file; or add --compare.")
    name, schedule = _schedule(options)
    shares, sizes = _shares(options), check(schedule)
    stages = "" if sizes.stages == sizes.ranks else f", {counted(sizes.stages, 'stage')}"
    title = (
        f"{name}: {counted(sizes.ranks, 'rank')}{stages}, {counted(sizes.microbatches, 'microbatch')}; {shares.text()}"
    )
    timeline, legend = shares.simulate(schedule), shares.axis_legend(schedule)
    if options.svg is not None:
        _write_svg(title, timeline, legend, options.svg)
    if options.json:
        print(json.dumps(as_json(title, timeline)))
        return
    from nxdpp.schedules.view.drawing import draw

    out = console(options.width)
    out.print(title)
    # The lines of a drawing have the width: to look for words in them takes most of the time.
    out.print(draw(timeline, out.width, legend), soft_wrap=True)
    out.print(*rank_tables(timeline, out.width), sep="\n")
    out.print(f"makespan {number(timeline.makespan)}, bubble {100 * timeline.mean_bubble:.1f} % on average")


def _write_svg(title: str, timeline: Timeline, legend: str, file: Path) -> None:
    from nxdpp.schedules.view.picture import write_picture

    try:
        write_picture(title, timeline, legend, file)
    except ImportError:
        raise ValueError(
            "--svg draws with matplotlib, which is not installed: pip install 'nxdpp[pictures]'."
        ) from None
    except OSError as error:
        raise ValueError(f"--svg: {file} cannot be written: {error.strerror}") from None


def _schedule(options: argparse.Namespace) -> tuple[str, Schedule]:
    if not options.name.endswith(".csv"):
        ranks, microbatches = _ranks_and_microbatches(options)
        return options.name, find_family(options.name).build(ranks, microbatches, options.virtual)
    if options.ranks or options.microbatches or options.virtual:
        raise ValueError(
            f"{options.name} sets the number of ranks, microbatches and chunks: leave out --ranks, --microbatches "
            f"and --virtual."
        )
    schedule = read_schedule(Path(options.name))
    forwards = sum(action.kind is ActionKind.FORWARD for actions in schedule for action in actions)
    tell_size(forwards, f"{options.name} has", _MOST)
    return Path(options.name).name, schedule


def _compare(options: argparse.Namespace) -> None:
    if options.svg is not None:
        raise ValueError("--svg draws one schedule: leave out --compare, or --svg.")
    chosen = None if options.name is None else find_family(options.name).name
    shares = _shares(options)
    ranks, microbatches = _ranks_and_microbatches(options)
    rows = compare(ranks, microbatches, options.virtual, shares)
    if options.json:
        print(json.dumps(comparison_as_json(rows)))
        return
    out = console(options.width)
    out.print(f"{counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}; {shares.text()}")
    out.print(*comparison_tables(rows, out.width, chosen), sep="\n")
    out.print("v: chunks per rank; peak: most microbatches in flight on a rank, a chunk being 1/v")


def _ranks_and_microbatches(options: argparse.Namespace) -> tuple[int, int]:
    missing = [f"--{name}" for name in ("ranks", "microbatches") if getattr(options, name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise ValueError(f"{' and '.join(missing)} {are} missing. Give both numbers: --ranks 4 --microbatches 8.")
    # A comparison is one schedule for each family.
    schedules = len(FAMILIES) if options.compare else 1
    size = schedules * options.ranks * options.microbatches * (options.virtual or 1)
    tell_size(size, f"{counted(options.ranks, 'rank')} and {counted(options.microbatches, 'microbatch')} make", _MOST)
    return options.ranks, options.microbatches


def _shares(options: argparse.Namespace) -> Shares:
    times = options.forward, options.input_gradient, options.weight_gradient, options.transfer, options.exchange
    return Shares(*times, options.zero)


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number of at least 0")
    return value
