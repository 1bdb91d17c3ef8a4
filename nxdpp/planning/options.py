"""Configuration file and options of ``python -m nxdpp plan``, checked before torch is imported."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxdpp.counted import check_whole
from nxdpp.devices import CUDA
from nxdpp.planning.layout import Layout
from nxdpp.planning.text_table import flops_of, rate_of, size_of
from nxdpp.schedules.families.registry import find_family

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Memory of a device where a given layout has no limit.
_UNLIMITED = "1000PB"
# Fields of a layout by their flags.
_FIELDS = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "expert_parallel_size": "experts",
    "virtual_pipeline_size": "chunks",
    "schedule": "schedule",
    "zero": "zero",
    "sequence_parallel": "sequence",
}
_PASSED = ("hosts", "link", "host_link", "peak", "bandwidth", "autocast", "gradient_dtype", "expert_load", "best")
# Options of a search, and options of a given layout.
_OF_SEARCH = ("global_batch", "best")
_OF_LAYOUT = ("num_microbatches", "batch_size")


def plan_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``nxdpp.plan``: of a search with ``--devices``, else of the layout that is given.

    Raises ``ValueError`` for options that are missing, not understood, or do not fit together.
    """
    found = _layout(options) if options.devices is None else _search(options)
    size_of(found["device_memory"], "device_memory")
    for name in ("link", "host_link", "bandwidth"):
        if getattr(options, name) is not None:
            rate_of(getattr(options, name), name)
    if options.peak is not None:
        flops_of(options.peak, "peak")
    if options.dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={options.dtype!r} is no floating dtype of a model: choose one of {', '.join(DTYPES)}.")
    if options.write is not None and options.write.suffix not in (".py", ".json"):
        raise ValueError(f"--write {options.write}: name a .py file for a program, or a .json file for the plan.")
    passed = {name: getattr(options, name) for name in _PASSED if getattr(options, name) is not None}
    return {
        "seq_length": options.seq_length,
        "device": "h100" if options.device == CUDA else options.device,
        "dtype": options.dtype,
        "costs": "measured" if options.measure else "counted",
        **passed,
        **found,
    }


def _search(options: argparse.Namespace) -> dict[str, Any]:
    """Return devices, batch and fixed fields of a search."""
    if missing := [name for name in ("device_memory", "global_batch") if getattr(options, name) is None]:
        raise ValueError(f"{_flags(missing)}: missing. A search with --devices needs it.")
    if given := [name for name in _OF_LAYOUT if getattr(options, name) is not None]:
        raise ValueError(f"{_flags(given)}: the search chooses it. Leave it out with --devices.")
    for name in ("devices", "hosts", "global_batch", "best"):
        if getattr(options, name) is not None:
            check_whole(name, getattr(options, name))
    if options.schedule is not None:
        find_family(options.schedule)
    fixed = {field: getattr(options, name) for name, field in _FIELDS.items() if getattr(options, name) is not None}
    if not fixed["sequence"]:
        del fixed["sequence"]
    sizes = {name: getattr(options, name) for name in ("devices", "device_memory", "global_batch")}
    return {**sizes, "fixed": fixed}


def _layout(options: argparse.Namespace) -> dict[str, Any]:
    """Return devices and batch of the given layout."""
    if given := [name for name in _OF_SEARCH if getattr(options, name) is not None]:
        raise ValueError(f"{_flags(given)}: for a search. Add --devices, the number of devices.")
    if missing := [name for name in ("pipeline_parallel_size", "num_microbatches") if getattr(options, name) is None]:
        raise ValueError(f"{_flags(missing)}: missing. Give the layout to predict, or --devices to search layouts.")
    microbatches: int = options.num_microbatches
    batch = options.batch_size or microbatches
    if batch % microbatches:
        raise ValueError(
            f"a batch of {batch} does not divide into {microbatches} microbatches. Use a multiple of {microbatches}."
        )
    fields = {field: getattr(options, name) for name, field in _FIELDS.items() if getattr(options, name) is not None}
    fields.setdefault("schedule", "1f1b" if fields.get("chunks", 1) == 1 else "interleaved")
    fields["chunks"] = find_family(fields["schedule"]).placement(fields["pipeline"], fields.get("chunks")).chunks
    layout = Layout(microbatch=batch // microbatches, **fields)
    layout.check()
    return {
        "devices": layout.devices,
        "device_memory": options.device_memory or _UNLIMITED,
        "global_batch": batch * layout.data,
        "layouts": [layout],
    }


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def configuration_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of ``path``, which may be its folder, and its content.

    Raises ``ValueError`` for a missing file, and for one that is not a JSON object with a ``model_type``.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = "the folder has no config.json" if path.is_dir() else "no such file"
        raise ValueError(
            f"{path}: {missing}. Give a Hugging Face configuration file, or a folder with its config.json."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        found = content.get("model_type") if isinstance(content, dict) else None
        raise ValueError(
            f"{file}: model_type is {found!r}. It must name a type of transformers (llama, qwen3, bert, ...)."
        )
    return file, content
