"""Checkpoints of a trainer, a file of each rank.

::

    save_dir/0001-0020/0.ckpt 1.ckpt    epoch 1, step 20
    save_dir/last/0.ckpt ...            links to the files of the last checkpoint, and of the best one
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nxdpp.agreement.together import from_all_ranks, together
from nxdpp.counted import counted
from nxdpp.doors.nnscaler.cli.configs import CheckpointConfig
from nxdpp.doors.nnscaler.state_dicts.deduped import deduped_state_dict, load_deduped_state_dict
from nxdpp.doors.nnscaler.state_dicts.merged import load_merged_state_dict, load_sharded_state_dict, merge_state_dicts
from nxdpp.doors.random_states import all_random_states


def save(trainer: Any, epoch: int, loss: float) -> None:
    """Save the training, and link ``last`` and ``best`` to it; collective over all ranks.

    A link is made when the files of all ranks are written. Raises on all ranks where one cannot write.
    """
    config, status = trainer.train_args.checkpoint, trainer.train_status
    loss = from_all_ranks(loss)[0]
    folder = Path(config.save_dir) / f"{epoch:04d}-{status.finished_train_steps:04d}"
    links = ["last"] * config.save_last + ["best"] * (config.save_best and loss <= status.best_loss)
    status.best_loss = min(status.best_loss, loss)
    model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    if config.save_type == "deduped":
        model, optimizer = deduped_state_dict(trainer.model, trainer.optimizer)
    state = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": trainer.lr_scheduler.state_dict() if trainer.lr_scheduler else None,
        "train_status": asdict(status),
        "train_args": trainer.train_args.to_dict(),
        "rng_states": (trainer.random_states[0], all_random_states()),
        "save_type": config.save_type,
    }
    trainer.tell("on_save_checkpoint", state)
    path = folder / f"{trainer.rank}.ckpt"
    together(lambda: _write(path, trainer, lambda new: _save_file(state, new)))
    for name in links:
        link, target = folder.parent / name / path.name, Path("..", folder.name, path.name)
        together(lambda link=link, target=target: _write(link, trainer, lambda new: new.symlink_to(target)))  # type: ignore[misc]
    if trainer.local_rank == 0:
        _remove_old(config)


def load(trainer: Any) -> None:
    """Resume the checkpoint of the arguments, if there is one; collective over all ranks.

    Raises ``ValueError`` on all ranks for files of different steps, and for a checkpoint that does not fit.
    """
    state = together(lambda: _read(trainer))
    steps = from_all_ranks(None if state is None else _finished(state))
    if len(set(steps)) > 1:
        raise ValueError(f"ranks resume files of different steps, {steps}: give a folder of one step in resume_from")
    if state is None:
        return
    trainer.tell("on_load_checkpoint", state)
    together(lambda: _check_fits(trainer, state))
    kind = state.get("save_type", "merged")
    loads = {"sharded": load_sharded_state_dict, "deduped": load_deduped_state_dict, "merged": load_merged_state_dict}
    loads[kind](trainer.model, state["model"], trainer.optimizer, state["optimizer"])
    if state.get("lr_scheduler"):
        trainer.lr_scheduler.load_state_dict(state["lr_scheduler"])
    vars(trainer.train_status).update(state.get("train_status") or {})
    if kind != "merged":
        trainer.random_states = state["rng_states"]
    trainer.tell("after_load_checkpoint", state)


def merged(files: Sequence[str | Path]) -> dict[str, Any]:
    """Return the state that the ``files`` of all ranks have together, without random states; needs no ranks.

    Raises ``ValueError`` for files of different trainings.
    """
    states = [_load_file(each) for each in files]
    of_all = {name: states[0][name] for name in ("train_args", "train_status", "lr_scheduler")}
    for name in of_all:
        # A number that is not a number differs from itself.
        if len({repr(_finished(state) if name == "train_status" else state[name]) for state in states}) > 1:
            raise ValueError(f"the files have different {name}: give the files of one checkpoint")
    model, optimizer = merge_state_dicts([each["model"] for each in states], [each["optimizer"] for each in states])
    return {**of_all, "model": model, "optimizer": optimizer, "save_type": "merged"}


def _read(trainer: Any) -> dict[str, Any] | None:
    path = trainer.train_args.checkpoint.path_to_resume()
    if path is None or path.is_file():
        return None if path is None else _load_file(path)
    ranks = sorted(int(each.stem) for each in path.glob("*.ckpt") if each.stem.isdigit())
    if ranks != list(range(trainer.world_size)):
        raise ValueError(
            f"{path} has the files of ranks {ranks}, and this job has {counted(trainer.world_size, 'rank')}: merge the "
            "files by Trainer.merge_checkpoint(files, output), and give the output"
        )
    return _load_file(path / f"{trainer.rank}.ckpt")


def _finished(state: Mapping[str, Any]) -> int:
    return int((state.get("train_status") or {}).get("finished_train_steps", 0))


def _check_fits(trainer: Any, state: Mapping[str, Any]) -> None:
    if state.get("lr_scheduler") and trainer.lr_scheduler is None:
        raise ValueError("the checkpoint has the state of a learning-rate scheduler: give lr_scheduler")
    wanted = trainer.train_args.global_batch_size
    had = (state.get("train_args") or {}).get("global_batch_size", wanted)
    if had != wanted and _finished(state):
        raise ValueError(
            f"the checkpoint is at another place in the data: its global_batch_size is {had}, not {wanted}: give {had}"
        )


def _save_file(state: dict[str, Any], path: Path) -> None:
    """Save what ``_load_file`` loads. Raises ``ValueError`` for objects of other classes, such as ones of a hook."""
    torch.save(state, path)
    if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        path.unlink()
        raise ValueError(f"objects of {', '.join(kinds)} cannot be resumed: save numbers, texts and tensors")


def _load_file(path: str | Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def _write(path: Path, trainer: Any, put: Callable[[Path], object]) -> None:
    """Let ``put`` write a file, and give it its name ``path`` then. Files of more ranks than there are go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    put(new)
    os.replace(new, path)
    if trainer.local_rank == 0:
        for other in path.parent.glob("*.ckpt"):
            if other.stem.isdigit() and int(other.stem) >= trainer.world_size:
                other.unlink(missing_ok=True)


def _remove_old(config: CheckpointConfig) -> None:
    """Remove all but the last checkpoints, and the ones that links lead to."""
    folder = Path(config.save_dir)
    linked = {each.resolve().parent for name in ("last", "best") for each in (folder / name).glob("*.ckpt")}
    found = [each for each in folder.iterdir() if re.fullmatch(r"\d+-\d+", each.name)]
    found.sort(key=lambda each: int(each.name.partition("-")[2]))
    for each in found[: -config.keep_last_n_checkpoints] if config.keep_last_n_checkpoints else ():
        if each.resolve() not in linked:
            shutil.rmtree(each, ignore_errors=True)
