"""``python -m nxdpp plan``: the prediction of a given layout, or with ``--devices`` the best layouts of a job."""

import argparse
import sys
from pathlib import Path

from nxdpp.devices import CUDA
from nxdpp.planning.layout import ZERO_STAGES
from nxdpp.planning.machine import DEVICES
from nxdpp.planning.options import DTYPES, configuration_file, plan_arguments
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.view.output import whole_number

_NUMBERS = {
    "--pipeline-parallel-size": "ranks of a pipeline",
    "--num-microbatches": "microbatches of a step",
    "--virtual-pipeline-size": "stages of a rank (1, or the schedule's)",
    "--batch-size": "samples of a replica in a step (one a microbatch)",
    "--seq-length": "length of a sequence (2048 tokens, or all positions)",
    "--tensor-parallel-size": "ranks that divide each layer (1)",
    "--data-parallel-size": "data-parallel replicas (1)",
    "--expert-parallel-size": "replicas that divide the experts of each layer (1)",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m nxdpp``."""
    parser = commands.add_parser(
        "plan",
        help="print the best layouts of a job, or time and memory of each rank of one",
        description="With --devices: search the layouts with the shortest steps. Without: predict the layout that is "
        "given, rank by rank. No weights are allocated.",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="Hugging Face configuration file, or its folder")
    for flag, text in _NUMBERS.items():
        parser.add_argument(flag, type=whole_number, metavar="N", help=text)
    parser.add_argument(
        "--schedule", metavar="NAME", help=f"{', '.join(FAMILIES)} (1f1b; interleaved with several stages per rank)"
    )
    parser.add_argument(
        "--device", choices=(CUDA, *DEVICES), default=CUDA, help="device of the ranks; cuda is h100 (cuda)"
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
        "--json", action="store_true", help="print the plan with all numbers as one JSON document, in bytes and seconds"
    )
    _add_machine(parser)
    parser.set_defaults(run=run)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search, and of the machine."""
    group = parser.add_argument_group("search and machine", "sizes given besides --devices fix a dimension")
    group.add_argument("--devices", type=int, metavar="N", help="number of devices: search their layouts")
    group.add_argument("--device-memory", metavar="SIZE", help="memory of a device, such as 80GB or 75GiB")
    group.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, all replicas together")
    group.add_argument("--hosts", type=int, metavar="N", help="hosts with equal numbers of devices (1)")
    group.add_argument("--link", metavar="RATE", help="rate of a device to another device of its host (400GB/s)")
    group.add_argument("--host-link", metavar="RATE", help="rate of a device to a device of another host (50GB/s)")
    group.add_argument("--peak", metavar="RATE", help="FLOPs a second of the device's data sheet, such as 989TFLOP/s")
    group.add_argument("--bandwidth", metavar="RATE", help="rate of the device's memory, such as 3.35TB/s")
    group.add_argument("--autocast", choices=("bfloat16",), help="float32 parameters, steps under torch.autocast")
    group.add_argument(
        "--gradient-dtype",
        choices=("float32",),
        help="gradients of half parameters add up in it, and are reduced in it",
    )
    group.add_argument(
        "--measure",
        action="store_true",
        help="time this machine and the layers in the place of --device, of its kind, and keep the times in "
        "~/.cache/nxdpp",
    )
    group.add_argument(
        "--expert-load",
        type=float,
        metavar="X",
        help="tokens of the busiest rank that shares experts, over the mean (1.25)",
    )
    group.add_argument("--best", type=int, metavar="N", help="layouts to print (10)")
    group.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="a .py file for the program of the best layout, or a .json file for the plan, for NxDPPModel.from_plan",
    )


def run(options: argparse.Namespace) -> None:
    """Print the layouts, or with ``--json`` one document.

    Raises ``ValueError`` for options that do not fit together, before torch is imported, and where no layout fits.
    """
    arguments = plan_arguments(options)
    configuration_file(options.config)
    from nxdpp.planning.configured_model import parts_without_inputs, read_configuration
    from nxdpp.planning.dtypes import dtype_named, name_of
    from nxdpp.planning.planner import plan
    from nxdpp.planning.written.plan_table import show
    from nxdpp.planning.written.program import program

    config = read_configuration(options.config)
    found = plan(config, **arguments)
    named = None if config.dtype is None else name_of(dtype_named(config.dtype))
    notes = [*parts_without_inputs(config, found.sample), *([found.note] if found.note else [])]
    source = program(found, str(options.config.resolve()))
    if options.json:
        print(found.to_json())
        for note in notes:
            print(f"nxdpp plan: {note}", file=sys.stderr)
    else:
        about = _dtype_text(found.model, found.dtype, options.dtype, named)
        if options.autocast is not None:
            about = f"{found.dtype}, as {found.model}(config) makes it; steps run under autocast to {options.autocast}"
        written = options.write is not None and options.write.suffix == ".py"
        file = str(options.write) if written else "train.py"
        show(found, about, "" if written else source, file, options.details, notes)
    if options.write is not None and options.write.suffix == ".py":
        options.write.write_text(source, encoding="utf-8")
    elif options.write is not None:
        found.write(options.write)


def _dtype_text(model: str, dtype: str, given: str | None, named: str | None) -> str:
    """Return the dtype of a plan, the construction that gives it, and the flag for the configuration's, ``named``."""
    if given is not None:
        return f"{dtype}, by --dtype: {model}(config).to(torch.{dtype})"
    text = f"{dtype}, as {model}(config) makes it"
    if named in (None, dtype):
        return f"{text}; --dtype plans for another"
    return f"{text}. The configuration names {named}, which its constructor does not read: --dtype {named} plans for it"
