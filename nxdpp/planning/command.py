"""``python -m nxdpp plan``: the stages of a given layout, or with ``--devices`` the best layouts of a job."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nxdpp.devices import CUDA
from nxdpp.planning.layout import ZERO_STAGES
from nxdpp.planning.layout_options import DTYPES, LayoutOptions, configuration_file, layout_options
from nxdpp.planning.machine import DEVICES
from nxdpp.planning.search_command import add_search_arguments, check_no_search, run_search
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.view.output import whole_number

if TYPE_CHECKING:
    from nxdpp.planning.layout_report import LayoutResult
    from nxdpp.planning.rank_summary import LayoutSummary

_NUMBERS = {
    "--pipeline-parallel-size": "ranks of a pipeline",
    "--num-microbatches": "microbatches of a step",
    "--virtual-pipeline-size": "stages of a rank (1, or the schedule's)",
    "--batch-size": "samples of a replica in a step (one a microbatch)",
    "--seq-length": "length of a sequence (2048 tokens, or all positions)",
    "--tensor-parallel-size": "ranks that divide each layer (1)",
    "--data-parallel-size": "data-parallel replicas (1)",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m nxdpp``."""
    parser = commands.add_parser(
        "plan",
        help="print the best layouts of a job, or work and memory of each rank of one",
        description="With --devices: search the layouts with the shortest steps. Without: print work and memory of "
        "each rank of a pipeline and of its stages. No weights are allocated.",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="Hugging Face configuration file, or its folder")
    for flag, text in _NUMBERS.items():
        parser.add_argument(flag, type=whole_number, metavar="N", help=text)
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"{', '.join(FAMILIES)}, or a CSV file of actions, one row per rank (1f1b; interleaved with several "
        f"stages per rank)",
    )
    parser.add_argument("--partition", choices=("even", "balanced"), default="even", help="choice of the cuts (even)")
    parser.add_argument("--memory-limit", type=_gib, metavar="GIB", help="GiB of a rank, for --partition balanced")
    parser.add_argument(
        "--device",
        choices=(CUDA, *DEVICES),
        default=CUDA,
        help="device of the ranks: on cuda memory has communicators and messages (cuda; with --devices h100); names "
        "of chips are for --devices",
    )
    parser.add_argument(
        "--dtype", metavar="NAME", help=f"dtype of the parameters, {', '.join(DTYPES)} (the constructor's: float32)"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="the tensor group divides the sequence between linear layers"
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=ZERO_STAGES,
        help="the replicas share: 1 the optimizer state, which is then float32; 2 parameters too, gathered once a "
        "step; 3 gathered for each microbatch (0; with --devices all, with half parameters from 1 on)",
    )
    parser.add_argument("--details", action="store_true", help="also print the other figures, in tables of their own")
    parser.add_argument(
        "--json", action="store_true", help="print all numbers as one JSON document, in bytes and FLOPs"
    )
    add_search_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the best layouts with ``--devices``, else the table of ranks.

    Raises ``ValueError`` for options that do not fit together, before torch is imported, and for options that do not
    fit the model.
    """
    if options.json and options.details:
        raise ValueError("--json has all figures: leave --details out.")
    if options.devices is not None:
        run_search(options)
        return
    check_no_search(options)
    given = layout_options(options)
    configuration_file(options.config)
    result = plan_layout(options.config, given)
    if options.json:
        from nxdpp.planning.layout_json import as_json

        print(json.dumps(as_json(result), indent=1))
        for note in result.notes:
            print(f"nxdpp plan: {note}", file=sys.stderr)
        return
    from nxdpp.planning.layout_report import report

    print(report(result, options.details))


def plan_layout(path: Path, given: LayoutOptions) -> "LayoutResult":
    """Return the ranks and stages of the configuration in ``path`` for the layout ``given``.

    Raises ``ValueError`` for options that do not fit the model.
    """
    import torch

    from nxdpp.planning.configured_model import (
        build_on_meta,
        microbatch_on_meta,
        parts_without_inputs,
        read_configuration,
    )
    from nxdpp.planning.dimensions import divided
    from nxdpp.planning.dtypes import dtype_named, dtype_of, name_of
    from nxdpp.planning.layout_report import LayoutResult
    from nxdpp.planning.rank_summary import summarise_layout
    from nxdpp.planning.stage_summary import summarise_stages

    config = read_configuration(path)
    named = None if config.dtype is None else name_of(dtype_named(config.dtype))
    model = build_on_meta(config, None if given.dtype is None else dtype_named(given.dtype))
    name, dtype = type(model).__name__, name_of(dtype_of(model))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    inputs = microbatch_on_meta(model, given.samples, given.length)
    given.sizes.check_length(inputs)
    with divided(model, given.sizes):
        stages = summarise_stages(
            model, inputs, given.schedule, given.balanced, given.memory_limit, torch.device(given.device), given.sizes
        )
        layout = summarise_layout(stages, given.schedule, given.sizes)
    shapes = {name: list(value.shape) for name, value in inputs.items()}
    notes = [*parts_without_inputs(config, inputs), *_notes(layout, parameters, given)]
    return LayoutResult(name, parameters, dtype, named, shapes, given, layout, notes)


def _notes(layout: "LayoutSummary", parameters: int, given: LayoutOptions) -> list[str]:
    notes = []
    held = sum(rank.state.parameters for rank in layout.ranks)
    if given.sizes.tensor == 1 and held > parameters:
        notes.append(f"{held - parameters:,} parameters of the total are copies: tied weights are on several ranks.")
    if any(stage.estimated for stage in layout.stages):
        notes.append("* estimated from the parameters: layers of this stage cannot run without data")
    return notes


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of GiB above 0")
    return value
