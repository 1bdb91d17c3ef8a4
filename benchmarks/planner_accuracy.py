"""Predictions of the planner next to measured layouts of a Llama over the cores of this machine.

    python benchmarks/planner_accuracy.py                               # about 5 minutes on 2 idle cores
    python benchmarks/planner_accuracy.py --few                         # 11 layouts, a third of the time
    python benchmarks/planner_accuracy.py --published                   # only the runs of others, half a minute
    python benchmarks/planner_accuracy.py --every-rank                  # their ranks, each a step of fake tensors
    python benchmarks/planner_accuracy.py --write benchmarks/results/planner.md  # also writes the tables into the page

``costs="measured"`` times single operations, collectives and the layers of the model; then each layout is predicted,
and then measured, of as many ranks as the machine has cores. The ranks are processes by gloo with OMP_NUM_THREADS
threads (1), each kept on a core. Times need an idle machine, memory does not.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaForCausalLM

from benchmarks.layouts.job import Shape
from benchmarks.page import write_blocks
from benchmarks.planner import published
from benchmarks.planner.layouts import LAYOUTS, SHAPE
from benchmarks.planner.measure import Case, measure_all
from benchmarks.planner.tables import Row, figures_table, rows_table
from benchmarks.report import session_line
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import Job, Link, Machine
from nxdpp.planning.measured.kept_machine import KeptMachine, measured_machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict
from tests.support.run_ranks import run_ranks

_TIMEOUT = 900.0
_FEW = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure, print tables in Markdown, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="every third layout")
    parser.add_argument("--published", action="store_true", help="predict runs that others published, measure none")
    parser.add_argument("--every-rank", action="store_true", help="run the ranks of published layouts without memory")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds of all layouts (2)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps of a layout in a round (3)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables between their marks in this page")
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    if options.every_rank:
        # The fake accelerator takes the place of other devices.
        from benchmarks.planner import every_rank

        blocks = {"every rank": every_rank.table(every_rank.all_peaks())}
    else:
        blocks = {"published": published.table()} if options.published else measured_blocks(options)
    print("\n\n".join(blocks.values()), flush=True)
    if options.write is not None:
        write_blocks(options.write, blocks)


def measured_blocks(options: argparse.Namespace) -> dict[str, str]:
    """Measure the machine, predict, and measure layouts; return the tables for the page."""
    session = session_line()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        machine = measured_machine("cpu")
        print(describe_machine(machine), flush=True)
        layouts = [each for each in LAYOUTS if each.devices <= (machine.cores or 1)]
        rows = compare(
            layouts[::_FEW] if options.few else layouts, SHAPE, machine, options.rounds, options.steps, machine
        )
    parts = (session, describe_machine(machine), figures_table(rows), rows_table(rows))
    return {"accuracy": "\n\n".join(parts)}


def compare(
    layouts: Sequence[Layout],
    shape: Shape,
    machine: KeptMachine,
    rounds: int,
    steps: int,
    layers_of: KeptMachine | None = None,
    autocast: torch.dtype | None = None,
) -> list[Row]:
    """Predict all layouts, then measure the layouts of each number of ranks in one start of processes.

    Layers are measured on ``layers_of``; ``None`` counts them. Steps run under ``autocast``, if it is given.
    """
    predictions = predict_all(layouts, shape, machine, layers_of, autocast)
    rows = []
    for ranks in sorted({layout.devices for layout in layouts}):
        own = [each for each in predictions if each.layout.devices == ranks]
        cases = [Case(each.layout, each.cuts, autocast) for each in own]
        threads = machine.about["threads"]
        measured = run_ranks(ranks, measure_all, cases, shape, rounds, steps, threads, timeout=_TIMEOUT)
        rows += [Row(each, of_ranks) for each, of_ranks in zip(own, zip(*measured, strict=True), strict=True)]
    return rows


def predict_all(
    layouts: Sequence[Layout],
    shape: Shape,
    machine: KeptMachine,
    layers_of: KeptMachine | None = None,
    autocast: torch.dtype | None = None,
) -> list[Prediction]:
    """Return the prediction of each layout; its devices are cores of ``machine``."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    job = Job(shape.microbatches * shape.batch, lambda size: microbatch_on_meta(model, size, shape.length))
    link = machine.link or Link(1e9)
    costs = {
        ranks: ModelCosts(
            model,
            Machine(ranks, memory // ranks, machine.device, link=link, host_link=link),
            job,
            layers_of,
            autocast=autocast,
        )
        for ranks in {layout.devices for layout in layouts}
    }
    return [predict(costs[layout.devices], layout) for layout in layouts]


def describe_machine(machine: KeptMachine) -> str:
    """Return a line with the figures of a machine."""
    own, about = machine.figures, machine.about
    return (
        f"Measured: {about['cores']} cores, {about['threads']} threads a rank, {own['flops_4'] / 1e9:.0f} GFLOP/s and "
        f"{own['bandwidth'] / 1e9:.1f} GB/s of AdamW a rank, {own['operation'] * 1e6:.1f} us an operation, "
        f"{own['action'] * 1e6:.0f} us an action, all-reduce {own['all_reduce'] / 1e9:.2f} GB/s and "
        f"{2 * own['latency'] * 1e6:.0f} us, reduce-scatter {own['reduce_scatter'] / 1e9:.2f} GB/s, all-gather "
        f"{own['all_gather'] / 1e9:.2f} GB/s, messages {own['message_rate'] / 1e9:.2f} GB/s and "
        f"{own['message_latency'] * 1e6:.0f} us."
    )


if __name__ == "__main__":
    main()
