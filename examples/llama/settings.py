"""Settings of train.py: the flags, checked with each other and with the model.

Nothing here is collective: each rank reads the same flags and gets the same result.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from corpus import Corpus, read_corpus, standard_library_files
from flags import AUTO, CHECKPOINTS, DTYPES, END, KEPT, make_parser, rank
from model_config import default_config, read_config
from transformers import LlamaConfig

from nxdpp.checkpoint.distributed.document import DOCUMENT
from nxdpp.trainer.checkpoint import has_checkpoint

# Time for rank 0 to print an error before the other ranks exit; torchrun ends them as soon as rank 0 has.
SECONDS_FOR_RANK_ZERO = 20.0


@dataclass(frozen=True)
class Settings:
    """Checked settings. ``batch_size`` is the number of sequences in a step over all ranks."""

    config: LlamaConfig
    pretrained: Path | None
    corpus: Corpus
    steps: int
    batch_size: int
    seq_length: int
    num_microbatches: int
    learning_rate: float
    max_grad_norm: float
    seed: int
    dtype: torch.dtype
    # None for a CUDA device where there are some, and else the CPU.
    device: str | None
    output: Path
    checkpoint_every: int | None
    checkpoint_dir: Path
    checkpoint_keep: int
    # "wait" or "skip" while a save is in flight; None for saves in the step.
    checkpoint_async: str | None
    checkpoint_errors: str
    # "auto" or the directory of one checkpoint.
    resume: str | Path | None
    pipeline_parallel_size: int
    tensor_parallel_size: int
    sequence_parallel: bool
    zero1: bool


def read_settings(arguments: Sequence[str]) -> Settings:
    """Read and check the command-line ``arguments``, the config and the text.

    Rank 0 also creates the output folder. Raises ``ValueError`` for the first error.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    flags = make_parser().parse_args(arguments)
    pipeline_parallel_size = flags.pipeline_parallel_size or max(1, world_size // flags.tensor_parallel_size)
    config = _read_config(flags)
    _check_division(flags, pipeline_parallel_size, world_size)
    _check_model(config, flags.seq_length, pipeline_parallel_size)
    _check_parts(config, flags.tensor_parallel_size)
    _check_sequence(flags)
    _fit_attention(config, flags)
    corpus = read_corpus(flags.data or standard_library_files())
    _check_length(corpus, flags.seq_length)
    flags.checkpoint_dir = flags.checkpoint_dir or flags.output / CHECKPOINTS
    _check_saves(flags)
    _check_resume(flags)
    if rank() == 0:
        _check_output(flags.output)
    values: dict[str, Any] = {
        **vars(flags),
        "config": config,
        "corpus": corpus,
        "checkpoint_keep": flags.checkpoint_keep or KEPT,
        "checkpoint_errors": flags.checkpoint_errors or END,
        "dtype": DTYPES[flags.dtype],
        "device": None if flags.device == AUTO else flags.device,
        "pipeline_parallel_size": pipeline_parallel_size,
        # A resumed training may have one replica only.
        "zero1": flags.zero1 and world_size > pipeline_parallel_size * flags.tensor_parallel_size,
    }
    del values["data"]
    return Settings(**values)


def refuse(error: ValueError | RuntimeError) -> NoReturn:
    """Print ``error`` on one rank and end this process with status 2.

    All ranks usually find the same error, and torchrun stops the others when the first one exits. The other ranks wait,
    so that rank 0 is the first. A rank that is not stopped has an error of its own and prints it.
    """
    if rank() != 0:
        time.sleep(SECONDS_FOR_RANK_ZERO)
    print(f"train.py: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def _read_config(flags: argparse.Namespace) -> LlamaConfig:
    if flags.pretrained is None:
        return read_config(flags.config) if flags.config else default_config()
    if flags.config is not None:
        raise ValueError("--config and --pretrained exclude each other: the folder has its own config.json")
    return read_config(flags.pretrained / "config.json")


def _check_division(flags: argparse.Namespace, pipeline_parallel_size: int, world_size: int) -> None:
    in_replica = pipeline_parallel_size * flags.tensor_parallel_size
    if world_size % in_replica:
        tensor = (
            "" if flags.tensor_parallel_size == 1 else f" times --tensor-parallel-size {flags.tensor_parallel_size}"
        )
        raise ValueError(
            f"{world_size} processes do not divide into pipelines of --pipeline-parallel-size "
            f"{pipeline_parallel_size}{tensor}: start a multiple of {in_replica} processes"
        )
    replicas = world_size // in_replica
    if flags.zero1 and replicas == 1 and flags.resume is None:
        raise ValueError(
            f"--zero1 divides the optimizer's state over data-parallel replicas, and {world_size} process(es) with "
            f"--pipeline-parallel-size {pipeline_parallel_size} are one replica: leave it out, or start more processes"
        )
    if flags.batch_size % (replicas * flags.num_microbatches):
        raise ValueError(
            f"--batch-size {flags.batch_size} does not divide into {replicas} data-parallel replica(s) of "
            f"--num-microbatches {flags.num_microbatches}: make it a multiple of "
            f"{replicas * flags.num_microbatches}"
        )


def _check_model(config: LlamaConfig, seq_length: int, pipeline_parallel_size: int) -> None:
    if config.num_hidden_layers < pipeline_parallel_size:
        raise ValueError(
            f"the model's {config.num_hidden_layers} layers are too few for {pipeline_parallel_size} "
            f"pipeline stages: set --pipeline-parallel-size to {config.num_hidden_layers} or less, or "
            "give a --config with more layers"
        )
    if seq_length > config.max_position_embeddings:
        raise ValueError(
            f"--seq-length {seq_length} is longer than the model's max_position_embeddings of "
            f"{config.max_position_embeddings}"
        )


def _fit_attention(config: LlamaConfig, flags: argparse.Namespace) -> None:
    """Take attention of single operations where autocast on XLA leaves the inputs of the fused one in two dtypes."""
    if flags.device == "xla" and DTYPES[flags.dtype] != torch.float32:
        config._attn_implementation = "eager"


def _check_parts(config: LlamaConfig, tensor_parallel_size: int) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    for name in names:
        number = getattr(config, name)
        if number % tensor_parallel_size:
            raise ValueError(
                f"the model's {name} of {number} does not divide over --tensor-parallel-size {tensor_parallel_size}"
            )


def _check_sequence(flags: argparse.Namespace) -> None:
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


def _check_length(corpus: Corpus, seq_length: int) -> None:
    for name, text in (("to train on", corpus.train), ("held out", corpus.held_out)):
        if len(text) < seq_length:
            raise ValueError(
                f"the text {name} has {len(text)} bytes, fewer than one sequence of --seq-length "
                f"{seq_length}: give more or longer --data files, or a shorter sequence"
            )


def _check_saves(flags: argparse.Namespace) -> None:
    for name in ("checkpoint_keep", "checkpoint_async", "checkpoint_errors"):
        if getattr(flags, name) is not None and flags.checkpoint_every is None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for the saves of --checkpoint-every: give that too, or leave {flag} out")


def _check_resume(flags: argparse.Namespace) -> None:
    if isinstance(flags.resume, Path):
        if not (flags.resume / DOCUMENT).is_file():
            raise ValueError(
                f"--resume {flags.resume} is no directory of a whole checkpoint, such as {flags.checkpoint_dir}/"
                f"step_100: give one, or auto for the newest"
            )
        flags.resume = flags.resume.resolve()
    elif flags.resume is None and has_checkpoint(flags.checkpoint_dir):
        raise ValueError(
            f"{flags.checkpoint_dir} has checkpoints of an earlier run: go on with --resume auto, "
            f"or give another --output"
        )


def _check_output(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to --output {folder}: {error.strerror}") from error
