"""Configuration file and options of a given layout on the command line, checked before torch is imported."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdpp.counted import counted
from nxdpp.devices import CUDA
from nxdpp.planning.layout import Dimensions
from nxdpp.schedules.check import check
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.families.registry import FAMILIES, find_family
from nxdpp.schedules.view.output import tell_size
from nxdpp.schedules.written import read_schedule

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Kinds of devices of a given layout.
_DEVICES = (CUDA, "cpu")
# Forwards of a schedule, one for each stage and microbatch: minutes of a simulation.
_MOST_FORWARDS = 2**20
_GIB = 2**30


@dataclass(frozen=True)
class LayoutOptions:
    """A layout whose stages are to be printed.

    Attributes:
        schedule: the schedule, with its ranks, microbatches and placement.
        schedule_name: name of its family, or the path of its file.
        samples: samples of a microbatch.
        length: tokens of a sample; ``None`` for the default.
        balanced: balance the work of the stages.
        memory_limit: bytes of a rank, or ``None``.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: name of the parameters' dtype; ``None`` for the constructor's.
        sizes: of the other dimensions.
    """

    schedule: ChosenSchedule
    schedule_name: str
    samples: int
    length: int | None
    balanced: bool
    memory_limit: int | None
    device: str
    dtype: str | None
    sizes: Dimensions


def layout_options(options: argparse.Namespace) -> LayoutOptions:
    """Return the checked options of a layout. Raises ``ValueError`` for options that do not fit together."""
    microbatches: int = options.num_microbatches
    batch = options.batch_size or microbatches
    if batch % microbatches:
        raise ValueError(
            f"a batch of {batch} does not divide into {microbatches} microbatches. Use a multiple of {microbatches}."
        )
    if options.device not in _DEVICES:
        raise ValueError(
            f"--device {options.device}: a given layout has no times, so it is for {' or '.join(_DEVICES)}. Leave it "
            f"out, or add --devices to search layouts."
        )
    sizes = Dimensions(
        options.tensor_parallel_size or 1,
        options.data_parallel_size or 1,
        options.zero or 0,
        options.sequence_parallel,
    )
    if sizes.is_sharded and sizes.data == 1:
        raise ValueError(f"--zero {sizes.zero} shares parameters among replicas: add --data-parallel-size.")
    balanced = options.partition == "balanced"
    if options.memory_limit is not None and not balanced:
        raise ValueError("a memory limit needs balanced cuts: add --partition balanced, or leave the limit out.")
    if options.memory_limit is not None and sizes.is_sharded:
        raise ValueError(f"--memory-limit has no figure for --zero {sizes.zero}: leave one of them out.")
    name, schedule = _schedule(options)
    placement = schedule.placement
    if balanced and placement.stages != placement.ranks * placement.chunks:
        raise ValueError(
            f"--partition balanced needs the same number of stages on each rank; {name} has {placement.stages} stages "
            f"on {placement.ranks} ranks. Leave --partition out."
        )
    return LayoutOptions(
        schedule,
        name,
        batch // microbatches,
        options.seq_length,
        balanced,
        None if options.memory_limit is None else int(options.memory_limit * _GIB),
        options.device,
        checked_dtype(options.dtype),
        sizes,
    )


def checked_dtype(name: str | None) -> str | None:
    """Return ``name``. Raises ``ValueError`` for a dtype that no model is made of."""
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype={name!r} is no floating dtype of a model: choose one of {', '.join(DTYPES)}.")
    return name


def flags_of(names: Sequence[str]) -> str:
    """Return the flags of the options ``names``, for messages."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _schedule(options: argparse.Namespace) -> tuple[str, ChosenSchedule]:
    ranks, microbatches = options.pipeline_parallel_size, options.num_microbatches
    name: str | None = options.schedule
    given: int | None = options.virtual_pipeline_size
    if name is None:
        name = "1f1b" if given in (None, 1) else "interleaved"
    if name.endswith(".csv"):
        _check_written(Path(name), ranks, microbatches, given)
    elif name not in FAMILIES:
        raise ValueError(f"there is no schedule {name!r}. Choose one of {', '.join(FAMILIES)}, or a CSV file.")
    else:
        family = find_family(name)
        if given is not None and given != family.default_chunks and not family.any_chunks:
            several = [each.name for each in FAMILIES.values() if each.any_chunks]
            stages = "1 stage" if family.default_chunks == 1 else f"{family.default_chunks} stages"
            raise ValueError(
                f"--schedule {name} has {stages} per rank, not {given}: leave "
                f"--virtual-pipeline-size out, or choose one of {', '.join(several)}, which take any number."
            )
        if family.default_chunks > 1 and given == 1:
            single = [each.name for each in FAMILIES.values() if each.default_chunks == 1]
            raise ValueError(
                f"--schedule {name} has several stages per rank, not 1: give --virtual-pipeline-size 2 or leave it "
                f"out, or choose one of {', '.join(single)}, which have one."
            )
    tell_size(
        ranks * microbatches * (given or 1),
        f"{counted(ranks, 'rank')} and {counted(microbatches, 'microbatch')} make",
        _MOST_FORWARDS,
    )
    schedule = ChosenSchedule(name, ranks, microbatches, given or 1)
    assert schedule.training
    return name, schedule


def _check_written(file: Path, ranks: int, microbatches: int, chunks: int | None) -> None:
    """Raise ``ValueError`` for a file that is for other numbers, with the flags that fit it."""
    written = read_schedule(file)
    found = check(written)
    if (found.ranks, found.microbatches) != (ranks, microbatches):
        raise ValueError(
            f"{file} is a schedule of {counted(found.ranks, 'rank')} and {counted(found.microbatches, 'microbatch')}: "
            f"give --pipeline-parallel-size {found.ranks} --num-microbatches {found.microbatches}."
        )
    most = max(len({action.stage for action in actions}) for actions in written)
    if chunks is not None and chunks != most:
        raise ValueError(
            f"{file} has up to {counted(most, 'stage')} per rank, not {chunks}: leave --virtual-pipeline-size out."
        )


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
