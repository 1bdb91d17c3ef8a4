"""``python -m nxdpp plan --devices``: the best layouts of a job."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nxdpp.devices import CUDA
from nxdpp.planning.layout_options import checked_dtype, configuration_file, flags_of
from nxdpp.planning.text_table import flops_of, rate_of, size_of
from nxdpp.schedules.families.registry import find_family

# Options of the search, and options of a given layout that a search has no use for.
_OF_SEARCH = (
    "device_memory", "global_batch", "hosts", "link", "host_link", "peak", "bandwidth", "autocast", "gradient_dtype",
    "measure", "write", "best",
)  # fmt: skip
_OF_LAYOUT = ("num_microbatches", "batch_size", "memory_limit")
_NEEDED = ("device_memory", "global_batch")
# Options of a given layout that fix a field of a layout in a search.
_FIXED = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "virtual_pipeline_size": "chunks",
    "schedule": "schedule",
    "zero": "zero",
    "sequence_parallel": "sequence",
}


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    group = parser.add_argument_group("search", "sizes given besides fix a dimension")
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
        action="store_const",
        const=True,
        help="time this machine and the layers in the place of --device, of its kind, and keep the times in "
        "~/.cache/nxdpp",
    )
    group.add_argument("--best", type=int, metavar="N", help="layouts to print (10)")
    group.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="a .py file for the program of the best layout, or a .json file for the plan, for NxDPPModel.from_plan",
    )


def check_no_search(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options of a search without ``--devices``, and for missing ones of a layout."""
    if given := [name for name in _OF_SEARCH if getattr(options, name) is not None]:
        raise ValueError(f"{flags_of(given)}: for a search. Add --devices, the number of devices.")
    if missing := [name for name in ("pipeline_parallel_size", "num_microbatches") if getattr(options, name) is None]:
        raise ValueError(
            f"{flags_of(missing)}: missing. Give the layout whose stages to print, or --devices to search layouts."
        )


def run_search(options: argparse.Namespace) -> None:
    """Print the best layouts, or with ``--json`` one document.

    Raises ``ValueError`` for options that are missing or not understood, before torch is imported, and where no layout
    fits.
    """
    fixed, chosen = _checked(options)
    configuration_file(options.config)
    from nxdpp.planning.configured_model import parts_without_inputs, read_configuration
    from nxdpp.planning.dtypes import dtype_named, name_of
    from nxdpp.planning.layout_report import dtype_text
    from nxdpp.planning.planner import plan
    from nxdpp.planning.written.plan_table import as_json, show
    from nxdpp.planning.written.program import program

    config = read_configuration(options.config)
    found = plan(
        config,
        devices=options.devices,
        device_memory=options.device_memory,
        global_batch=options.global_batch,
        seq_length=options.seq_length,
        device="h100" if options.device == CUDA else options.device,
        dtype=options.dtype,
        fixed=fixed,
        costs="measured" if options.measure else "counted",
        **chosen,
    )
    named = None if config.dtype is None else name_of(dtype_named(config.dtype))
    notes = [*parts_without_inputs(config, found.sample), *([found.note] if found.note else [])]
    source = program(found, str(options.config.resolve()))
    if options.json:
        print(json.dumps(as_json(found, named, source), indent=1))
        for note in notes:
            print(f"nxdpp plan: {note}", file=sys.stderr)
    else:
        about = dtype_text(found.model, found.dtype, options.dtype, named)
        if options.autocast is not None:
            about = f"{found.dtype}, as {found.model}(config) makes it; steps run under autocast to {options.autocast}"
        written = options.write is not None and options.write.suffix == ".py"
        file = str(options.write) if written else "train.py"
        show(found, about, "" if written else source, file, options.details, notes)
    if options.write is not None and options.write.suffix == ".py":
        options.write.write_text(source, encoding="utf-8")
    elif options.write is not None:
        found.write(options.write)


def _checked(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fixed fields of layouts, and other arguments of ``plan``. Raises ``ValueError`` for wrong options."""
    if missing := [name for name in _NEEDED if getattr(options, name) is None]:
        raise ValueError(f"{flags_of(missing)}: missing. A search with --devices needs it.")
    given = [name for name in _OF_LAYOUT if getattr(options, name) is not None]
    if given or options.partition != "even":
        names = [*given, *(["partition"] if options.partition != "even" else [])]
        raise ValueError(f"{flags_of(names)}: the search chooses it. Leave it out with --devices.")
    size_of(options.device_memory, "device_memory")
    for name in ("link", "host_link", "bandwidth"):
        if getattr(options, name) is not None:
            rate_of(getattr(options, name), name)
    if options.peak is not None:
        flops_of(options.peak, "peak")
    if options.write is not None and options.write.suffix not in (".py", ".json"):
        raise ValueError(f"--write {options.write}: name a .py file for a program, or a .json file for the plan.")
    for name in ("devices", "hosts", "global_batch", "best"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be a whole number of at least 1.")
    checked_dtype(options.dtype)
    if options.schedule is not None:
        find_family(options.schedule)
    fixed = {field: getattr(options, name) for name, field in _FIXED.items() if getattr(options, name) is not None}
    if not fixed["sequence"]:
        del fixed["sequence"]
    passed = ("hosts", "link", "host_link", "peak", "bandwidth", "autocast", "gradient_dtype", "best")
    named = {name: getattr(options, name) for name in passed}
    return fixed, {name: value for name, value in named.items() if value is not None}
