"""Checkpoints of the training itself: saved every few steps, and resumed from.

::

    OUTPUT/checkpoints/latest
    OUTPUT/checkpoints/step_40/    weights, optimizer, schedule, random states, position in the data, and metrics
"""

import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from flags import END
from rich.console import Console
from settings import Settings

from nxdpp import NxDPPModel
from nxdpp.agreement.together import from_first_rank
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.document import parsed_document, read_document
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint

# Keys of a checkpoint's content.
STEP, SETTINGS, MODEL, METRICS = "step", "settings", "model", "metrics"

# Fields of a config that change no step.
NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")

Found = tuple[Path, str | None]


def check_resume(settings: Settings) -> None:
    """Compare the settings with the settings of the checkpoint to resume from; not collective.

    Raises ``ValueError`` if the training would not continue exactly.
    """
    if settings.resume is None:
        return
    content = _content_to_resume(settings, settings.resume)
    if content is None:
        # Nothing was saved, or the load reports the damage.
        return
    step: int = content[STEP]
    if step > settings.steps:
        raise ValueError(f"the checkpoint is of step {step}, beyond --steps {settings.steps}: give more steps")
    own, saved = _settings(settings), content[SETTINGS]
    others = [f"{flag} {saved[flag]}, not {own[flag]}" for flag in own if own[flag] != saved[flag] and flag != "--data"]
    if own["--data"] != saved["--data"]:
        others.append("other text in --data")
    model, before = _model(settings), content[MODEL]
    names = [name for name in model if name in before and model[name] != before[name]]
    others += [f"a model with {name} {before[name]}, not {model[name]}" for name in names]
    if others:
        raise ValueError(
            f"the checkpoint of step {step} was made with {', '.join(others)}, and the training would not go on "
            f"exactly: give the same, or another --output without --resume"
        )


def checkpoint_to_resume(settings: Settings) -> Found | None:
    """Return the path and tag to load; ``None`` to start anew. Collective over all ranks.

    The tag is ``None`` for the newest whole checkpoint.
    """
    if isinstance(settings.resume, Path):
        return settings.resume.parent, settings.resume.name
    if settings.resume is None or not from_first_rank(lambda: has_checkpoint(settings.checkpoint_dir)):
        return None
    return settings.checkpoint_dir, None


def resume(
    settings: Settings,
    found: Found,
    model: NxDPPModel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    console: Console,
) -> torch.Tensor:
    """Load the checkpoint ``found``, and return the metrics of its steps; collective over all ranks."""
    path, tag = found
    content = load_checkpoint(path, tag, model, optimizer, schedule)
    if tag is not None and path == settings.checkpoint_dir.resolve():
        # Later checkpoints belong to an abandoned training: a restart resumes from this one.
        from_first_rank(lambda: directory.write_latest(path, tag))
    # The saved rate of the next step differs if --steps did.
    for group, peak, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule.last_epoch)
    console.print(f"goes on after step {content[STEP]}, from {path}", highlight=False, soft_wrap=True)
    metrics: torch.Tensor = content[METRICS]
    return metrics


def is_due(settings: Settings, step: int) -> bool:
    """Return whether the training is saved after ``step``: at each interval, and at the end."""
    every = settings.checkpoint_every
    return every is not None and (step % every == 0 or step == settings.steps)


def save(
    settings: Settings,
    step: int,
    model: NxDPPModel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    metrics: torch.Tensor,
    console: Console,
) -> None:
    """Save the training after ``step``, with the ``metrics`` of its steps; collective over all ranks.

    Raises ``OSError`` if a file of this save, or of the previous save in the background, cannot be written and the
    settings ask for the end of the training.
    """
    content = {STEP: step, SETTINGS: _settings(settings), MODEL: _model(settings), METRICS: metrics}
    try:
        done = save_checkpoint(
            settings.checkpoint_dir,
            f"step_{step}",
            model,
            optimizer,
            schedule,
            content,
            num_kept_ckpts=settings.checkpoint_keep,
            async_save=settings.checkpoint_async is not None,
            when_busy=settings.checkpoint_async or "wait",
        )
    except OSError as error:
        go_on_or_end(settings, error, console)
    else:
        if not done:
            console.print(f"no checkpoint of step {step}: the save before is in flight", highlight=False)


def finish(settings: Settings, console: Console) -> None:
    """Wait for the save in the background; collective over all ranks."""
    try:
        finalize_checkpoint()
    except OSError as error:
        go_on_or_end(settings, error, console)


def go_on_or_end(settings: Settings, error: OSError, console: Console) -> None:
    """Print the ``error`` of a save, the same kind on all ranks; raise it if the settings ask for the end."""
    if settings.checkpoint_errors == END:
        raise error
    console.print(f"no checkpoint: {error}", highlight=False, soft_wrap=True)


def lines_of_interrupt(settings: Settings, step: int) -> tuple[str, str]:
    """Two lines on a training that was interrupted after ``step``, 0 for none; not collective."""
    when = f"after step {step}" if step else "before step 1"
    tags = directory.tags(settings.checkpoint_dir)
    if tags:
        remedy = f"checkpoint: {settings.checkpoint_dir / tags[0]}; the same flags with --resume auto go on"
    elif settings.checkpoint_every:
        remedy = "no checkpoint: no step was done"
    else:
        remedy = "no checkpoint: --checkpoint-every N writes some, and --resume auto goes on from them"
    return f"interrupted {when} of {settings.steps}", remedy


def _content(folder: Path) -> dict[str, Any]:
    """Return the statements of the training about the checkpoint in ``folder``, without its metrics.

    Raises ``ValueError`` for a damaged document, and for a checkpoint of a different program.
    """
    content = parsed_document(folder, read_document(folder)).content["user_content"]
    if not isinstance(content, dict) or not {STEP, SETTINGS, MODEL, METRICS} <= content.keys():
        raise ValueError(f"{folder} is a checkpoint of another program: give one of train.py, or another --output")
    return content


def _content_to_resume(settings: Settings, resume: str | Path) -> dict[str, Any] | None:
    """Content of the checkpoint to load: for ``auto`` the newest one whose document is whole."""
    if isinstance(resume, Path):
        return _content(resume)
    for tag in directory.tags(settings.checkpoint_dir):
        with suppress(DamagedFile):
            return _content(settings.checkpoint_dir / tag)
    return None


def _settings(settings: Settings) -> dict[str, Any]:
    """Settings that the next batches depend on, and the rate that the schedule begins with."""
    return {
        "--data": zlib.crc32(settings.corpus.train),
        "--seed": settings.seed,
        "--batch-size": settings.batch_size,
        "--seq-length": settings.seq_length,
        "--learning-rate": settings.learning_rate,
    }


def _model(settings: Settings) -> dict[str, Any]:
    """Fields of the model's config, as JSON."""
    fields = json.loads(settings.config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in NOT_OF_THE_MODEL}
