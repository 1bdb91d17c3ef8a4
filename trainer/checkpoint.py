"""Checkpoints of a training, with the names of NeuronX Distributed's trainer.

::

    nxdpp.save_checkpoint("out", "step_100", model, optimizer, scheduler, {"step": 100}, num_kept_ckpts=3)
    content = nxdpp.load_checkpoint("out", None, model, optimizer, scheduler)       # the newest

The names and their meaning are those of NeuronX Distributed's developer guide for saving and loading checkpoints.
"""

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.background import BackgroundSaves
from nxdpp.checkpoint.distributed.captured import Stateful, captured
from nxdpp.checkpoint.distributed.claim import release
from nxdpp.checkpoint.distributed.first_whole import LoadArguments, load_first_whole
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.save import Save
from nxdpp.parallel_layers.faults.board import board
from nxdpp.trainer.model import NxDModel
from nxdpp.trainer.optimizer import NxDOptimizer

_BUSY = ("wait", "skip")

_saves = BackgroundSaves()


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
    *,
    grad_scaler: Stateful | None = None,
    when_busy: str = "wait",
) -> bool:
    """Save a training in ``path/tag``, for any layout of ranks to load; collective over all ranks.

    A checkpoint has original names and whole shapes. The states of all ranks' random generators belong to it. Files
    come first, then the document that makes it count, then ``path/latest``; older checkpoints are removed after that.
    A tag that is there already is replaced in the same way. ``path`` is on a file system that all hosts share.

    Args:
        path: directory of the training's checkpoints, made if it is missing.
        tag: name of this one, such as ``"step_100"``.
        model: an ``NxDPPModel``, an ``NxDModel``, or a module of one process.
        optimizer: of torch, a ``Zero1Optimizer`` or an ``NxDOptimizer``, over parameters of ``model``.
        scheduler, grad_scaler: objects with ``state_dict``; those of rank 0 are saved.
        user_content: of rank 0: numbers, strings, tensors, lists, tuples and dicts of them.
        num_workers, use_xser: no meaning here: each rank writes its own part with one thread, in safetensors files.
        num_kept_ckpts: number of checkpoints to keep, at least 1; ``None`` keeps all.
        async_save: return when the values are copied to host memory. A thread writes them. Its error is raised by a
            training step: the same one on every rank, or by the next call of these functions before that. A program
            that ends without one prints the error, and has status 1.
        zero1_optimizer: no meaning here: the optimizer tells it.
        when_busy: ``"wait"`` for a save in flight, or ``"skip"`` this one.

    Returns:
        ``False`` if the save was skipped.

    Raises:
        ValueError: for content that a checkpoint cannot hold, and for states of ranks that contradict each other.
        OSError: for files that cannot be written. Earlier checkpoints are there, and the training can go on.
        RuntimeError: in the debug mode, and for a directory that hosts do not share.
    """
    directory.check_tag(tag)
    if num_kept_ckpts is not None and num_kept_ckpts < 1:
        raise ValueError(f"num_kept_ckpts={num_kept_ckpts} must be at least 1, or None to keep all checkpoints.")
    if when_busy not in _BUSY:
        raise ValueError(f"when_busy={when_busy!r} must be one of {', '.join(map(repr, _BUSY))}.")
    with board.call("save_checkpoint"):
        exchange = Exchange()
        if when_busy == "skip" and any(exchange.all_of(_saves.is_in_flight)):
            return False
        _saves.wait()
        own = _model(model), _optimizer(optimizer)
        state = exchange.together(lambda: captured(*own, scheduler, grad_scaler, user_content))
        save = Save(Path(path) / tag, num_kept_ckpts, exchange)
        if async_save:
            _saves.start(save, state)
        else:
            save.write(save.plan(state))
    return True


def finalize_checkpoint() -> None:
    """Wait until the save in flight is at its end, and free the host memory of asynchronous saves.

    Another program may save in the directory then. Collective over all ranks. Raises the error of that save.
    """
    with board.call("finalize_checkpoint"):
        Exchange().together(_saves.wait)
        _saves.close()
        release()


def has_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` has a checkpoint that was saved to its end; not collective."""
    return bool(directory.tags(Path(path)))


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    num_workers: int = 8,
    strict: bool = True,
    *,
    grad_scaler: Stateful | None = None,
) -> Any:
    """Load what ``save_checkpoint`` has saved in any layout of ranks; collective over all ranks.

    Values are read into the memory of ``model`` and ``optimizer``. Each rank reads its own part. In the layout that
    was saved the random generators continue too.

    Args:
        path: directory of the training's checkpoints.
        tag: ``None`` loads the newest. One that is damaged is named in a warning, and the next older one is loaded.
        model, optimizer, scheduler, grad_scaler: as in the save; what is left out is not loaded.
        num_workers: no meaning here.
        strict: ``False`` allows names that only the model, or only the checkpoint has.

    Returns:
        The user's content, on all ranks; ``None`` without one.

    Raises:
        FileNotFoundError: without a checkpoint, or without that of ``tag``.
        ValueError: for names, shapes, dtypes or groups that do not fit, before anything is changed. For a damaged file
            of ``tag``, with its name; without ``tag`` if no checkpoint is whole.
        OSError: for a file that cannot be read.
    """
    with board.call("load_checkpoint"):
        _saves.wait()
        exchange = Exchange()
        tags = [tag] if tag is not None else exchange.from_first(lambda: directory.tags_to_load(Path(path)))
        if not tags:
            raise FileNotFoundError(f"{path} has no checkpoint: has_checkpoint({str(path)!r}) tells it beforehand.")
        folders = [Path(path) / each for each in tags]
        own = _model(model), _optimizer(optimizer)
        return load_first_whole(folders, exchange, LoadArguments(*own, scheduler, grad_scaler, strict))


def _model(model: nn.Module | None) -> nn.Module | None:
    return model.module if isinstance(model, NxDModel) else model


def _optimizer(optimizer: Optimizer | None) -> Optimizer | None:
    return optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
