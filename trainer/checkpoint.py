"""Checkpoints of a training with the names of NeuronX Distributed's trainer."""

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.captured import Stateful, captured
from nxdpp.checkpoint.distributed.load import Load
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.save import Save
from nxdpp.trainer.model import NxDModel
from nxdpp.trainer.optimizer import NxDOptimizer


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str = "",
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    grad_scaler: Stateful | None = None,
) -> None:
    """Save."""
    directory.check_tag(tag)
    exchange = Exchange()
    state = exchange.together(
        lambda: captured(_model(model), _optimizer(optimizer), scheduler, grad_scaler, user_content)
    )
    save = Save(Path(path) / tag, num_kept_ckpts, exchange)
    save.write(save.plan(state))


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    num_workers: int = 8,
    strict: bool = True,
    grad_scaler: Stateful | None = None,
) -> Any:
    """Load."""
    exchange = Exchange()
    found = exchange.from_first(lambda: directory.tags(Path(path))) if tag is None else [tag]
    if not found:
        raise FileNotFoundError(f"{path} has no checkpoint.")
    load = Load(Path(path) / found[0], exchange)
    load.prepare(_model(model), _optimizer(optimizer), scheduler, grad_scaler, strict)
    return load.read()


def has_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` has a whole checkpoint; not collective."""
    return bool(directory.tags(Path(path)))


def _model(model: nn.Module | None) -> nn.Module | None:
    return model.module if isinstance(model, NxDModel) else model


def _optimizer(optimizer: Optimizer | None) -> Optimizer | None:
    return optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
