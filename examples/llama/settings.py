"""Settings of train.py: the flags, checked with each other and with the model.

Nothing here is collective: each rank reads the same flags and gets the same result. Nothing here imports torch, so that
a wrong flag is answered at once.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import checks
from corpus import Corpus, read_corpus, standard_library_files
from first_ctrl_c import rank
from flags import AUTO, CHECKPOINTS, END, KEPT, read_flags
from model_fields import default_fields, read_fields

if TYPE_CHECKING:
    from transformers import LlamaConfig

# Time for rank 0 to print an error before the other ranks exit; torchrun ends them as soon as rank 0 has.
SECONDS_FOR_RANK_ZERO = 20.0


@dataclass(frozen=True)
class Settings:
    """Checked settings. ``batch_size`` is the number of sequences in a step over all ranks."""

    # Fields of the model's config.json, and the file; None for the default ones.
    fields: dict[str, Any]
    config_file: Path | None
    pretrained: Path | None
    corpus: Corpus
    steps: int
    batch_size: int
    seq_length: int
    num_microbatches: int
    learning_rate: float
    max_grad_norm: float
    seed: int
    # Name of the dtype of the forward.
    dtype: str
    # None for a CUDA device where there is one, and else the CPU.
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
    # None for 1F1B, interleaved with several stages per rank.
    schedule: str | None
    virtual_pipeline_size: int
    partition: str
    tensor_parallel_size: int
    sequence_parallel: bool
    zero1: bool
    # "once" a step or for each "microbatch"; None for whole weights on each replica.
    shard: str | None
    trace: Path | None
    compare: bool

    @cached_property
    def config(self) -> "LlamaConfig":
        """The model's config; imports transformers. Raises ``ValueError`` for a model that cannot run."""
        from model_config import checked_config

        return checked_config(self)


def read_settings(arguments: Sequence[str]) -> Settings:
    """Read and check the command-line ``arguments``, the fields of the config and the text.

    Rank 0 also creates the output folder. Raises ``ValueError`` for the first error.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    flags = read_flags(arguments)
    if flags.pipeline_parallel_size is None:
        flags.pipeline_parallel_size = max(1, world_size // flags.tensor_parallel_size)
    config_file = _config_file(flags)
    fields = read_fields(config_file) if config_file else default_fields()
    checks.check_division(flags, world_size)
    stages = checks.check_schedule(flags)
    checks.check_model(fields, flags, stages)
    checks.check_sequence(flags)
    checks.check_figures(flags)
    corpus = read_corpus(flags.data or standard_library_files())
    checks.check_length(corpus, flags.seq_length)
    flags.checkpoint_dir = flags.checkpoint_dir or flags.output / CHECKPOINTS
    checks.check_saves(flags)
    checks.check_resume(flags)
    if rank() == 0:
        checks.check_output("--output", flags.output)
        if flags.checkpoint_every is not None:
            checks.check_output("--checkpoint-dir", flags.checkpoint_dir)
    values: dict[str, Any] = {
        **vars(flags),
        "fields": fields,
        "config_file": config_file,
        "corpus": corpus,
        "checkpoint_keep": flags.checkpoint_keep or KEPT,
        "checkpoint_errors": flags.checkpoint_errors or END,
        "device": None if flags.device == AUTO else flags.device,
        # A resumed training may have one replica only.
        "zero1": flags.zero1 and world_size > flags.pipeline_parallel_size * flags.tensor_parallel_size,
    }
    del values["data"], values["config"]
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


def _config_file(flags: argparse.Namespace) -> Path | None:
    if flags.pretrained is None:
        file: Path | None = flags.config
        return file
    if flags.config is not None:
        raise ValueError("--config and --pretrained exclude each other: the folder has its own config.json")
    folder: Path = flags.pretrained
    return folder / "config.json"
