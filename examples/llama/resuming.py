"""Checkpoints of the training itself: saved every few steps, and gone on from.

::

    OUTPUT/checkpoints/latest
    OUTPUT/checkpoints/step_40/    weights, optimizer, schedule, random states, and the position in the data
"""

import zlib
from pathlib import Path
from typing import Any

import torch
from report import METRICS, UNFINISHED_METRICS, keep_metrics
from rich.console import Console
from settings import CHECKPOINTS, Settings

from nxdpp import NxDPPModel
from nxdpp.checkpoint.distributed.directory import write_latest
from nxdpp.parallel_layers.all_ranks import from_first_rank
from nxdpp.trainer.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint

KEPT = 3

# Keys of a checkpoint's content.
STEP, DATA = "step", "data"


def checkpoint_to_resume(settings: Settings) -> tuple[Path, str | None] | None:
    """Return the path and tag to load; ``None`` to start anew. Collective over all ranks.

    The tag is ``None`` for the newest whole checkpoint.
    """
    folder = settings.output / CHECKPOINTS
    if isinstance(settings.resume, Path):
        return settings.resume.parent, settings.resume.name
    if settings.resume is None or not from_first_rank(lambda: has_checkpoint(folder)):
        return None
    return folder, None


def resume(
    settings: Settings, model: NxDPPModel, optimizer: torch.optim.Optimizer, schedule: Any, console: Console
) -> int:
    """Load the checkpoint that the settings ask for, and return its step; 0 without one.

    Collective over all ranks. The lines of later steps are removed from the metrics. Raises ``ValueError`` if the
    settings are not those with which the checkpoint was made.
    """
    found = checkpoint_to_resume(settings)
    if found is None:
        return 0
    path, tag = found
    content = load_checkpoint(path, tag, model, optimizer, schedule)
    step: int = content[STEP]
    _check(settings, step, content[DATA])
    if tag is not None and path == (settings.output / CHECKPOINTS).resolve():
        # Later checkpoints are of a training that is given up: a restart goes on from this one.
        from_first_rank(lambda: write_latest(path, tag))
    sources = [path.parent / name for name in (UNFINISHED_METRICS, METRICS)]
    whole = from_first_rank(lambda: keep_metrics(settings.output, sources, step))
    console.print(f"goes on after step {step}, from {path}", highlight=False, soft_wrap=True)
    if not whole:
        said = f"{path.parent} lacks metrics of steps up to {step}: metrics.jsonl begins later"
        console.print(said, highlight=False, soft_wrap=True)
    return step


def is_due(settings: Settings, step: int) -> bool:
    """Return whether the training is saved after ``step``."""
    return settings.checkpoint_every is not None and step % settings.checkpoint_every == 0


def save(settings: Settings, step: int, model: NxDPPModel, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Save the training after ``step``; collective over all ranks."""
    content = {STEP: step, DATA: _data(settings)}
    folder = settings.output / CHECKPOINTS
    save_checkpoint(folder, f"step_{step}", model, optimizer, schedule, content, num_kept_ckpts=KEPT)


def _data(settings: Settings) -> dict[str, Any]:
    """Settings that the next batches depend on, and the rate that the optimizer has saved."""
    return {
        "--data": zlib.crc32(settings.corpus.train.numpy().tobytes()),
        "--seed": settings.seed,
        "--batch-size": settings.batch_size,
        "--seq-length": settings.seq_length,
        "--learning-rate": settings.learning_rate,
    }


def _check(settings: Settings, step: int, data: dict[str, Any]) -> None:
    if step > settings.steps:
        raise ValueError(f"the checkpoint is of step {step}, beyond --steps {settings.steps}: give more steps")
    own = _data(settings)
    others = [flag for flag in own if own[flag] != data[flag]]
    if others:
        was = ", ".join(f"{flag} {data[flag]}" for flag in others if flag != "--data")
        raise ValueError(
            f"the checkpoint of step {step} was made with other {', '.join(others)}{f' ({was})' if was else ''}, and "
            f"the training would not go on exactly: give the same, or another --output without --resume"
        )
