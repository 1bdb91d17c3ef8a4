"""Parts of the trainer's arguments, each about one object of a training."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxdpp.doors.nnscaler.cli.arguments import made

_LOGGER = logging.getLogger(__name__)


@dataclass
class ModelConfig:
    """Full name of a class or factory, or itself, and its arguments; of the model a class of end-to-end modules."""

    type: Any = None
    args: dict[str, Any] = field(default_factory=dict)


LogConfig = ModelConfig
"""A logger: an object with ``setup(config)``, ``log_metrics(metrics, step, tag=)`` and ``finalize()``."""

HookConfig = HookMapConfig = dict
"""A hook: ``type`` and ``args``, with which the class is called, or a function by each name of ``HOOKS``."""


@dataclass
class OptimizerConfig(ModelConfig):
    """The optimizer, and how gradients and losses of micro-batches become one."""

    clip_gnorm: float = 0.0
    loss_reduction: str = "mean"
    grad_reduction: str = "mean"
    aggregate_outputs_fn: Any = None


@dataclass
class LRSchedulerConfig(ModelConfig):
    """The learning-rate scheduler, which steps once an ``interval``: an epoch or a step."""

    interval: str = "epoch"


@dataclass
class DatasetConfig:
    """The data sets, and the arguments of each stage."""

    type: Any = None
    train_args: dict[str, Any] = field(default_factory=dict)
    val_args: dict[str, Any] = field(default_factory=dict)
    test_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataloaderConfig(DatasetConfig):
    """The loaders; without arguments of their own the other stages take the ones of the training."""

    type: Any = "torch.utils.data.DataLoader"


@dataclass
class DatasetSamplerConfig(DatasetConfig):
    """The samplers, likewise, which give each unit its part of the data."""

    type: Any = "torch.utils.data.DistributedSampler"


@dataclass
class ResumeOptions:
    """The checkpoint to resume: ``last``, ``best``, a folder of this number of ranks, or a merged file."""

    checkpoint: Any = "last"


@dataclass
class CheckpointConfig:
    """The times and the folder of saves, and the checkpoint that is resumed."""

    save_dir: str = "./checkpoints"
    no_save: bool = False
    save_type: str = "sharded"
    save_last: bool = True
    save_best: bool = True
    symlink_best_and_last: bool = True
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    keep_last_n_checkpoints: int | None = None
    resume_from: ResumeOptions | str | None = None

    def __post_init__(self) -> None:
        """Verify the numbers, and take a checkpoint for the options that name it."""
        if not self.symlink_best_and_last:
            raise ValueError("checkpoint.symlink_best_and_last=False is refused: last and best are links")
        for name in ("every_n_train_steps", "every_n_epochs", "keep_last_n_checkpoints"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"checkpoint.{name}={value} must be above 0; None for no number")
        if isinstance(self.resume_from, str):
            self.resume_from = ResumeOptions(self.resume_from)

    def path_to_resume(self) -> Path | None:
        """Return the folder or file to resume; ``None`` for none, and for ``last`` or ``best`` before the first save.

        Raises ``ValueError`` for any other path that does not exist.
        """
        name = made(self.resume_from.checkpoint) if isinstance(self.resume_from, ResumeOptions) else None
        if not name:
            return None
        is_link = name in ("last", "best")
        path = Path(self.save_dir) / name if is_link else Path(name)
        if not path.exists():
            if not is_link:
                raise ValueError(f"checkpoint.resume_from: {path} does not exist")
            _LOGGER.warning("there is no checkpoint %s yet: the training begins anew", path)
            return None
        return path
