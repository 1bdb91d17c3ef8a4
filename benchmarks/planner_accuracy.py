"""Predictions of the planner next to measured layouts of a Llama over 2 and 4 ranks of this machine.

    python benchmarks/planner_accuracy.py                               # about 10 minutes on 2 idle cores
    python benchmarks/planner_accuracy.py --few                         # 8 layouts, to try it
    python benchmarks/planner_accuracy.py --published                   # only the runs of others, half a minute
    python benchmarks/planner_accuracy.py --write benchmarks/results/planner.md  # also writes the tables into the page

The machine is calibrated from single operations and collectives, then each layout is predicted, and then measured. The
ranks are processes of one thread, by gloo, each kept on a core. 4 ranks share 2 cores. Times need an idle machine,
memory does not.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaForCausalLM

from benchmarks.layouts.job import Shape
from benchmarks.page import write_blocks
from benchmarks.planner import published
from benchmarks.planner.calibrate import Speed, calibrate
from benchmarks.planner.layouts import LAYOUTS, SHAPE
from benchmarks.planner.measure import Case, measure_all
from benchmarks.planner.tables import Row, figures_table, rows_table
from benchmarks.report import session_line
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import Job
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict
from tests.support.run_ranks import run_ranks

_TIMEOUT = 900.0
_FEW = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, predict, measure, print tables in Markdown, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="every fourth layout")
    parser.add_argument("--published", action="store_true", help="predict runs that others published, measure none")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds of all layouts (2)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps of a layout in a round (3)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables between their marks in this page")
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    blocks = {"published": published.table()} if options.published else measured_blocks(options)
    print("\n\n".join(blocks.values()), flush=True)
    if options.write is not None:
        write_blocks(options.write, blocks)


def measured_blocks(options: argparse.Namespace) -> dict[str, str]:
    """Calibrate, predict and measure; return the tables for the page."""
    session = session_line()
    cores = len(os.sched_getaffinity(0))
    speed = calibrate(SHAPE, cores)
    print(describe_speed(speed), flush=True)
    rows = compare(LAYOUTS[::_FEW] if options.few else LAYOUTS, SHAPE, speed, cores, options.rounds, options.steps)
    parts = (session, describe_speed(speed), figures_table(rows), rows_table(rows))
    return {"accuracy": "\n\n".join(parts)}


def compare(layouts: Sequence[Layout], shape: Shape, speed: Speed, cores: int, rounds: int, steps: int) -> list[Row]:
    """Predict all layouts, then measure the layouts of each number of ranks in one start of processes."""
    predictions = predict_all(layouts, shape, speed, cores)
    rows = []
    for ranks in sorted({layout.devices for layout in layouts}):
        own = [each for each in predictions if each.layout.devices == ranks]
        cases = [Case(each.layout, each.cuts) for each in own]
        measured = run_ranks(ranks, measure_all, cases, shape, rounds, steps, timeout=_TIMEOUT)
        rows += [Row(each, of_ranks) for each, of_ranks in zip(own, zip(*measured, strict=True), strict=True)]
    return rows


def predict_all(layouts: Sequence[Layout], shape: Shape, speed: Speed, cores: int) -> list[Prediction]:
    """Return the prediction of each layout; its devices are ranks that share ``cores``."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    job = Job(shape.microbatches * shape.batch, lambda size: microbatch_on_meta(model, size, shape.length))
    costs = {
        ranks: ModelCosts(model, speed.machine(ranks, memory // ranks, cores), job)
        for ranks in {layout.devices for layout in layouts}
    }
    return [predict(costs[layout.devices], layout) for layout in layouts]


def describe_speed(speed: Speed) -> str:
    """Return a line with the figures of the calibration."""
    return (
        f"Calibrated: {speed.flops / 1e9:.0f} GFLOP/s and {speed.bandwidth / 1e9:.1f} GB/s a core, "
        f"{speed.operation * 1e6:.1f} us an operation, {speed.action * 1e6:.0f} us an action, all-reduce "
        f"{speed.rate / 1e9:.2f} GB/s and {2 * speed.latency * 1e6:.0f} us."
    )


if __name__ == "__main__":
    main()
