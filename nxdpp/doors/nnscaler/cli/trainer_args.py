"""``TrainerArgs``: the arguments of a training, and the objects that they name."""

import logging
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from nxdpp.doors.nnscaler.cli import configs
from nxdpp.doors.nnscaler.cli.arguments import build, made, named_object, plain, read_arguments
from nxdpp.doors.nnscaler.cli.train_hook import HOOKS, TrainHook
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.optimizer import build_optimizer
from nxdpp.doors.nnscaler.policies import POLICIES

REFUSED = {
    "tracing_from_weights": "a trace reads no values: load them by checkpoint.resume_from",
    "model.parallel_modules": "the trainer trains one end-to-end module: call parallelize for parts, in a program",
    "checkpoint.resume_from.convert_fn": "convert the file before",
    "checkpoint.resume_from.with_merged": "Trainer.merge_checkpoint(files, output) merges files",
    # Ranks compare values, the log has a line for a step, and no argument refers to another.
    **dict.fromkeys(("debug", "enable_progress_bar", "vars")),
}
"""Arguments of nnScaler's trainer that this one refuses, with the reason; ``None`` for one without effect."""

REDUCTIONS = ("mean", "sum", "per-token-mean")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "none": None}
_TENSORS = ("param", "buffer", "input")
_LOGGER = logging.getLogger(__name__)


@dataclass
class TrainerArgs:
    """Arguments of ``Trainer``. Classes and functions are given as full names, or as themselves.

    Raises ``ValueError`` for arguments that do not fit together.
    """

    init_module: str | None = None
    compute_config: ComputeConfig = None  # type: ignore[assignment]  # None is refused
    gen_savedir: str = "./.nnscaler"
    gen_reuse: str = "auto"
    pas_policy: Any = "autodist"
    broadcast_strategy: str = "all"
    instance_name: Any = None
    run_mode: str = "run"
    dummy_sample_gen_fn: Any = None
    model: configs.ModelConfig = field(default_factory=configs.ModelConfig)
    optimizer: configs.OptimizerConfig = field(default_factory=configs.OptimizerConfig)
    dataset: configs.DatasetConfig = field(default_factory=configs.DatasetConfig)
    dataloader: configs.DataloaderConfig = field(default_factory=configs.DataloaderConfig)
    dataset_sampler: configs.DatasetSamplerConfig | None = None
    lr_scheduler: configs.LRSchedulerConfig | None = None
    checkpoint: configs.CheckpointConfig = field(default_factory=configs.CheckpointConfig)
    log: list[configs.ModelConfig] = field(default_factory=list)
    hook: Any = None
    precision: Any = None
    micro_batch_size: int = 1
    global_batch_size: int = 0
    grad_accumulation_steps: int = 0
    max_epochs: int | None = None
    max_train_steps: int | None = None
    max_val_steps: int | None = None
    val_every_n_train_steps: int | None = None
    val_every_n_epochs: int | None = 1
    log_progress_every_n_train_steps: int | None = 100
    seed: int | None = None
    init_env_fn: Any = None

    def __post_init__(self) -> None:
        """Verify the arguments, and compute the batch sizes."""
        if self.compute_config is None or not self.compute_config.use_end2end:
            raise ValueError("compute_config is needed, with use_end2end=True: the trainer calls train_step")
        for name in ("model", "optimizer", "dataset"):
            if not getattr(self, name).type:
                raise ValueError(f"{name}.type is needed: the full name of its class")
        for each in fields(self):
            value, least = getattr(self, each.name), int(each.name == "micro_batch_size")
            if each.type in (int, int | None) and each.name != "seed" and (value or 0) < least:
                raise ValueError(f"{each.name}={value} must be above 0; leave it out for no number")
        if not (self.max_epochs or self.max_train_steps):
            raise ValueError("max_epochs or max_train_steps is needed: the training has no end")
        if self.gen_reuse == "auto":
            self.gen_reuse = "moo" if self.run_mode == "compile" else "match"
        given = self.precision or "none"
        given = given if isinstance(given, dict) else dict.fromkeys(_TENSORS, given)
        self.precision = dict.fromkeys(_TENSORS, "none") | given
        checkpoint, optimizer = self.checkpoint, self.optimizer
        if not (checkpoint.every_n_epochs or checkpoint.every_n_train_steps):
            checkpoint.every_n_epochs = 1
        choices: list[tuple[str, Any, Iterable[str]]] = [
            ("run_mode", self.run_mode, ("compile", "run")),
            ("lr_scheduler.interval", self.lr_scheduler.interval if self.lr_scheduler else "step", ("epoch", "step")),
            ("optimizer.loss_reduction", optimizer.loss_reduction, REDUCTIONS),
            ("optimizer.grad_reduction", optimizer.grad_reduction, REDUCTIONS),
            ("checkpoint.save_type", checkpoint.save_type, ("sharded", "deduped")),
            *(("precision", name, _TENSORS) for name in self.precision),
            *((f"precision.{name}", value, _DTYPES) for name, value in self.precision.items()),
            # A module has one dtype.
            ("precision.buffer", self.precision["buffer"], (self.precision["param"],)),
        ]
        for name, value, allowed in choices:
            _check_choice(name, value, allowed)
        if REDUCTIONS[2] in (optimizer.loss_reduction, optimizer.grad_reduction) and not optimizer.aggregate_outputs_fn:
            raise ValueError("per-token-mean needs optimizer.aggregate_outputs_fn, which counts the tokens")
        if checkpoint.every_n_epochs and checkpoint.every_n_train_steps:
            raise ValueError("checkpoint.every_n_epochs and every_n_train_steps are given: leave one of them out")
        unit = self.micro_batch_size * self.scaling_factor
        accumulated = self.grad_accumulation_steps or self.global_batch_size // unit or 1
        if self.global_batch_size not in (0, unit * accumulated):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} must be micro_batch_size={self.micro_batch_size} times "
                f"{self.scaling_factor} units times grad_accumulation_steps={accumulated}"
            )
        self.global_batch_size, self.grad_accumulation_steps = unit * accumulated, accumulated
        for name, value in self.compute_config.pas_config.items():
            is_number = name in ("pipeline_nmicros", "update_freq") and self.pas_policy in ("pp", "hybrid", "autodist")
            if is_number and value != accumulated:
                raise ValueError(f"pas_config.{name}={value!r} must equal grad_accumulation_steps={accumulated}")
        if self.seed is None and self.init_env_fn is None:
            _LOGGER.warning("neither seed nor init_env_fn is given: the training cannot be repeated")

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> Self:
        """Return the arguments of a command line ``[-f FILE] [--name.of.argument VALUE ...]``."""
        return cls.from_dict(read_arguments(argv))

    @classmethod
    def from_dict(cls, arguments: dict[str, Any]) -> Self:
        """Return the arguments of nested dicts. Raises ``ValueError`` for unknown and refused ones."""
        if name := arguments.get("init_module"):
            named_object(name)
        return build(cls, arguments, REFUSED)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as nested dicts, with full names of classes and functions."""
        return plain(self)  # type: ignore[no-any-return]

    @property
    def plan_config(self) -> ComputeConfig:
        """``compute_config`` of ``parallelize``, with the other arguments that a plan depends on."""
        config = self.compute_config
        others = {"policy": self.pas_policy, "mbs": self.micro_batch_size, "gbs": self.global_batch_size}
        others |= {"precision": self.precision, "model_args": self.model.args}
        return replace(
            config,
            pas_config={**config.pas_config, "update_freq": self.grad_accumulation_steps},
            user_config={**config.user_config, "__from_trainer_args": plain(others)},
        )

    @property
    def scaling_factor(self) -> int:
        """Number of units."""
        return self.compute_config.units

    def dtype(self, kind: str) -> torch.dtype | None:
        """Dtype of floating tensors of ``kind``: ``param``, ``buffer`` or ``input``; ``None`` for the one they have."""
        return _DTYPES[self.precision[kind]]

    @property
    def policy(self) -> Any:
        """The policy: one of the names, or a function."""
        return self.pas_policy if self.pas_policy in POLICIES else named_object(self.pas_policy)

    @property
    def model_type(self) -> type[nn.Module]:
        """Class of the model. Raises ``ValueError`` for anything else, and for a class that is a hook."""
        kind = named_object(self.model.type)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or issubclass(kind, TrainHook):
            raise ValueError(f"model.type={self.model.type!r} must be a class of modules, and no TrainHook")
        return kind

    def init_env(self, trainer: Any) -> None:
        """Seed torch, NumPy and Python, and call ``init_env_fn``."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
            np.random.seed(self.seed)
            random.seed(self.seed)
        if self.init_env_fn:
            named_object(self.init_env_fn)(trainer)

    def create_model(self) -> nn.Module:
        """Return a new model."""
        return self.model_type(**made(self.model.args))

    def create_parallel_optimizer(self, module: nn.Module) -> Any:
        """Return the optimizer of ``build_optimizer``."""
        return build_optimizer(
            module, named_object(self.optimizer.type), self.compute_config, **made(self.optimizer.args)
        )

    def create_dataset(self, stage: str = "train") -> Any:
        """Return the data set of ``stage``; ``None`` for a stage other than ``train`` that has no arguments."""
        arguments = getattr(self.dataset, f"{stage}_args")
        return named_object(self.dataset.type)(**made(arguments)) if arguments or stage == "train" else None

    def create_dataloader(self, stage: str, dataset: Any) -> Any:
        """Return the loader of the part of ``dataset`` that this rank's unit takes."""
        arguments = made(getattr(self.dataloader, f"{stage}_args") or self.dataloader.train_args)
        if "batch_size" in arguments:
            raise ValueError("dataloader has batch_size: give micro_batch_size in its place")
        if "collate_fn" in arguments:
            arguments["collate_fn"] = named_object(arguments["collate_fn"])
        if not isinstance(dataset, IterableDataset):
            config = self.dataset_sampler or configs.DatasetSamplerConfig()
            unit = int(os.environ.get("RANK", "0")) // self.compute_config.plan_ngpus
            own = made(getattr(config, f"{stage}_args") or config.train_args)
            own |= {"dataset": dataset, "num_replicas": self.scaling_factor, "rank": unit}
            arguments["sampler"] = named_object(config.type)(**own)
        elif self.dataset_sampler:
            raise ValueError("an IterableDataset takes no dataset_sampler: leave it out")
        return named_object(self.dataloader.type)(dataset=dataset, batch_size=self.micro_batch_size, **arguments)

    def create_lr_scheduler(self, optimizer: Any) -> Any:
        """Return the learning-rate scheduler, or ``None``."""
        config = self.lr_scheduler
        return named_object(config.type)(optimizer, **made(config.args)) if config else None

    def create_hook(self) -> Any:
        """Return the hook. Raises ``ValueError`` for a function under an unknown name."""
        given = self.hook or {}
        if given.get("type"):
            return named_object(given["type"])(made(given.get("args") or {}))
        hook = TrainHook()
        for name, function in given.items():
            _check_choice("hook", name, HOOKS)
            if function:
                setattr(hook, name, named_object(function))
        return hook


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
