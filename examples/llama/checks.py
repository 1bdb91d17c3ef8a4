"""Checks of the flags with each other, with the model and with the text, all without torch.

Each raises ``ValueError`` with the remedy.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from corpus import Corpus

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.timeline_file import check_path


class Flags(Protocol):
    """Flags that are compared with the model's config."""

    @property
    def seq_length(self) -> int:
        """Bytes in a sequence."""

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks of a pipeline."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share each layer."""


def check_division(flags: argparse.Namespace, world_size: int) -> None:
    """The processes must divide into replicas, and the batch over them and their microbatches."""
    in_replica = flags.pipeline_parallel_size * flags.tensor_parallel_size
    if world_size % in_replica:
        tensor = (
            "" if flags.tensor_parallel_size == 1 else f" times --tensor-parallel-size {flags.tensor_parallel_size}"
        )
        raise ValueError(
            f"{_processes(world_size)} not divide into pipelines of --pipeline-parallel-size "
            f"{flags.pipeline_parallel_size}{tensor}: start a multiple of {in_replica} processes"
        )
    replicas = world_size // in_replica
    if flags.shard and flags.zero1:
        raise ValueError("--shard divides the optimizer's state too: leave --zero1 out")
    if flags.shard and flags.device == "xla":
        raise ValueError("--shard is for the CPU and CUDA: on XLA give --zero1 in its place")
    flag = "--zero1" if flags.zero1 else "--shard"
    if (flags.zero1 or flags.shard) and replicas == 1 and flags.resume is None:
        raise ValueError(
            f"{flag} divides the optimizer's state over data-parallel replicas, and {world_size} process(es) with "
            f"--pipeline-parallel-size {flags.pipeline_parallel_size} are one replica: leave it out, or start more "
            "processes"
        )
    if flags.batch_size % (replicas * flags.num_microbatches):
        raise ValueError(
            f"--batch-size {flags.batch_size} does not divide into {replicas} data-parallel replica(s) of "
            f"--num-microbatches {flags.num_microbatches}: make it a multiple of "
            f"{replicas * flags.num_microbatches}"
        )


def check_schedule(flags: argparse.Namespace) -> int:
    """Return the number of stages; the schedule of a step must exist for the ranks, microbatches and stages."""
    try:
        chosen = ChosenSchedule(
            flags.schedule, flags.pipeline_parallel_size, flags.num_microbatches, flags.virtual_pipeline_size
        )
        # Some families do not have all numbers of microbatches.
        assert chosen.training, "a schedule has ranks"
    except ValueError as error:
        given = [f"--schedule {flags.schedule}"] if flags.schedule else []
        given += [f"--virtual-pipeline-size {flags.virtual_pipeline_size}"] if flags.virtual_pipeline_size > 1 else []
        text = str(error).removesuffix(".")
        raise ValueError(
            f"{' with '.join(given)} on {flags.pipeline_parallel_size} pipeline rank(s) with --num-microbatches "
            f"{flags.num_microbatches}: {text}"
        ) from None
    stages = chosen.placement.stages
    if flags.partition != "even" and stages != chosen.ranks * chosen.placement.chunks:
        raise ValueError(
            f"--partition {flags.partition} needs the same number of stages on each rank, and --schedule "
            f"{flags.schedule} has {stages} stages on {chosen.ranks} ranks: leave --partition out"
        )
    if flags.partition == "profiled" and flags.tensor_parallel_size > 1:
        raise ValueError(
            f"--partition profiled measures layers on one rank, which do not run alone with --tensor-parallel-size "
            f"{flags.tensor_parallel_size}: take --partition balanced"
        )
    return stages


def check_model(fields: Mapping[str, Any], flags: Flags, stages: int) -> None:
    """Compare the fields that the config has with the flags and the number of stages."""
    layers = _number(fields, "num_hidden_layers")
    if layers is not None and layers < stages:
        one_each = stages == flags.pipeline_parallel_size
        remedy = f"set --pipeline-parallel-size to {layers} or less" if one_each else "take fewer stages per rank"
        raise ValueError(
            f"the model's {layers} layers are too few for {stages} pipeline stages: {remedy}, or give a --config with "
            f"more layers"
        )
    longest = _number(fields, "max_position_embeddings")
    if longest is not None and flags.seq_length > longest:
        raise ValueError(
            f"--seq-length {flags.seq_length} is longer than the model's max_position_embeddings of {longest}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        number = _number(fields, name)
        if number is not None and number % flags.tensor_parallel_size:
            raise ValueError(
                f"the model's {name} of {number} does not divide over --tensor-parallel-size "
                f"{flags.tensor_parallel_size}"
            )


def check_sequence(flags: argparse.Namespace) -> None:
    """``--sequence-parallel`` needs ranks that share a layer, and sequences that divide over them."""
    if not flags.sequence_parallel:
        return
    if flags.tensor_parallel_size == 1:
        raise ValueError(
            "--sequence-parallel divides activations over the processes that share a layer: give "
            "--tensor-parallel-size too, or leave it out"
        )
    if flags.seq_length % flags.tensor_parallel_size:
        raise ValueError(
            f"--seq-length {flags.seq_length} does not divide over --tensor-parallel-size "
            f"{flags.tensor_parallel_size}, as --sequence-parallel needs it"
        )


def check_length(corpus: Corpus, seq_length: int) -> None:
    """Both texts must be as long as one sequence."""
    for name, text in (("to train on", corpus.train), ("held out", corpus.held_out)):
        if len(text) < seq_length:
            raise ValueError(
                f"the text {name} has {len(text)} bytes, fewer than one sequence of --seq-length "
                f"{seq_length}: give more or longer --data files, or a shorter sequence"
            )


def check_figures(flags: argparse.Namespace) -> None:
    """``--trace`` must name a file that can be written, and ``--compare`` needs a device and steps that it measures."""
    # Rank 0 makes a new output folder before any rank writes.
    in_output = flags.trace is not None and flags.trace.parent.resolve() == flags.output.resolve()
    if flags.trace is not None and not (in_output and not flags.output.exists()):
        try:
            check_path(flags.trace)
        except ValueError as error:
            raise ValueError(str(error).replace("trace_file_path=", "--trace ").removesuffix(".")) from None
    if flags.compare and flags.device == "xla":
        raise ValueError("--compare measures one process on the CPU or on CUDA, not on XLA: leave it out")
    if flags.compare and flags.steps < 2:
        raise ValueError(f"--compare leaves the first step out, and --steps is {flags.steps}: give at least 2 steps")


def check_saves(flags: argparse.Namespace) -> None:
    """Flags of the saves need the saves."""
    for name in ("checkpoint_keep", "checkpoint_async", "checkpoint_errors"):
        if getattr(flags, name) is not None and flags.checkpoint_every is None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for the saves of --checkpoint-every: give that too, or leave {flag} out")


def check_resume(flags: argparse.Namespace) -> None:
    """``--resume`` must name a checkpoint, and checkpoints of an earlier run need ``--resume``."""
    if isinstance(flags.resume, Path):
        if not (flags.resume / DOCUMENT).is_file():
            raise ValueError(
                f"--resume {flags.resume} is no directory of a whole checkpoint, such as {flags.checkpoint_dir}/"
                f"step_100: give one, or auto for the newest"
            )
        flags.resume = flags.resume.resolve()
    elif flags.resume is None and directory.tags(flags.checkpoint_dir):
        raise ValueError(
            f"{flags.checkpoint_dir} has checkpoints of an earlier run: go on with --resume auto, "
            f"or give another --output"
        )


def check_output(flag: str, folder: Path) -> None:
    """Create the ``folder`` that ``flag`` names, which must take files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"cannot write to {flag} {folder}: {reason}") from error


def _processes(count: int) -> str:
    """``1 process does`` or ``4 processes do``."""
    return "1 process does" if count == 1 else f"{count} processes do"


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    """The whole number in a field; ``None`` without one."""
    value = fields.get(name)
    return value if isinstance(value, int) else None
