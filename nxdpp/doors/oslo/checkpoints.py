"""Checkpoints of a parallel model: a file for each rank of the first replica, or one merged file.

::

    parallel_ckpt/   pytorch_model_tp_0_pp_0.bin   pytorch_model_tp_1_pp_0.bin   config.json
    merged_ckpt/     pytorch_model.bin             config.json

Each file is written under a temporary name first. It gets its own name when the files of all ranks are complete.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.distributed.whole_state import gather_state_dict
from nxdpp.counted import counted
from nxdpp.doors.oslo.mpu import MPU
from nxdpp.ground.torch_names import STORAGE_ADDRESS
from nxdpp.ranks.exchange import Exchange

MERGED = "pytorch_model.bin"
CONFIG = "config.json"
SaveFunction = Callable[[Any, Any], object]

_PART = re.compile(r"pytorch_model_tp_(\d+)_pp_(\d+)\.bin")
_READ_FIRST = ("model.safetensors", "model.safetensors.index.json", "adapter_config.json")
_UNFINISHED = ".unfinished"


def save_parts(
    model: PreTrainedModel, mpu: MPU, directory: Path, state: Mapping[str, Any], config: bool, save: SaveFunction
) -> None:
    """Write ``state`` of each rank of the first replica to ``directory``; collective over all ranks."""

    def check() -> None:
        _make(directory)
        _check_sizes(directory, mpu, "give another directory, or remove the file")

    def write() -> Iterator[Path]:
        if mpu.get_data_parallel_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            yield _written(directory / _own_name(mpu), lambda path: save(state, path))
        if config and _is_first(mpu):
            yield _written(directory / CONFIG, lambda path: path.write_text(_configuration(model)))

    _save(directory, check, write)


def save_merged(model: PreTrainedModel, mpu: MPU, directory: Path, config: bool, save: SaveFunction) -> None:
    """Write the whole tensors of ``model`` as one file of transformers; collective over all ranks."""
    first = _is_first(mpu)

    def check() -> None:
        if first:
            _make(directory)
        for name in _READ_FIRST:
            if first and (directory / name).exists():
                raise ValueError(
                    f"{directory} has {name}, which from_pretrained would read in place of {MERGED}: give another "
                    f"directory, or remove it"
                )

    def write() -> Iterator[Path]:
        if first:
            yield _written(directory / MERGED, lambda path: save(whole, path))
            if config:
                yield _written(directory / CONFIG, lambda path: path.write_text(_configuration(model)))

    Exchange(consequence=f"{directory} was not written", kinds=()).together(check)
    whole = gather_state_dict(model)
    _save(directory, check, write)


def load_parts(model: PreTrainedModel, mpu: MPU, directory: Path) -> None:
    """Load each rank's file of ``directory`` into ``model``; collective over all ranks.

    No rank changes its model if one rank's file does not fit.
    """
    state = Exchange(consequence="nothing was loaded", kinds=()).together(lambda: _read(model, mpu, directory))
    with torch.no_grad():
        model.load_state_dict(state, strict=False)


def local_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of ``model`` that this rank holds, in host memory; a tied one is there once, by two names."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    return {name: copies.setdefault(_identity(tensor), _compact(tensor)) for name, tensor in model.state_dict().items()}


def _read(model: PreTrainedModel, mpu: MPU, directory: Path) -> dict[str, torch.Tensor]:
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is no directory: give the directory of save_parallelized")
    _check_sizes(directory, mpu, "initialize the model with the sizes of the save")
    path = directory / _own_name(mpu)
    if not path.exists():
        found = ", ".join(sorted(each.name for each in directory.glob("*.bin"))) or "no such files"
        raise FileNotFoundError(
            f"{path} does not exist ({directory} has {found}): initialize the model with the sizes of the save"
        )
    state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    expected = model.state_dict()
    if different := [name for name in (*expected, *state) if (name in expected) != (name in state)]:
        where = "is missing in" if different[0] in expected else "is not this rank's, but is in"
        raise ValueError(
            f"{counted(len(different), 'name differs', 'names differ')} between {path} and this rank's part of the "
            f"model. {different[0]} {where} the file: initialize the same model with the sizes of the save"
        )
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has the shape {tuple(state[name].shape)} in {path} and {tuple(tensor.shape)} on this rank: "
                f"initialize the same model with the sizes of the save"
            )
    return state


def _save(directory: Path, check: Callable[[], None], write: Callable[[], Iterator[Path]]) -> None:
    exchange = Exchange(consequence=f"{directory} was not written", kinds=())
    exchange.together(check)
    unfinished = exchange.together(lambda: list(write()))

    def finish() -> None:
        for path in unfinished:
            os.replace(path, path.with_name(path.name.removesuffix(_UNFINISHED)))

    Exchange(consequence=f"{directory} may have files of an earlier save", kinds=()).together(finish)


def _written(path: Path, write: Callable[[Path], object]) -> Path:
    unfinished = path.with_name(f"{path.name}{_UNFINISHED}")
    # No link is written through.
    unfinished.unlink(missing_ok=True)
    write(unfinished)
    return unfinished


def _make(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file: give a directory")
    directory.mkdir(parents=True, exist_ok=True)


def _check_sizes(directory: Path, mpu: MPU, remedy: str) -> None:
    """Raise ``ValueError`` for a file of a rank that does not exist now."""
    size = mpu.get_tensor_parallel_world_size()
    for path in sorted(directory.glob("pytorch_model_tp_*.bin")):
        place = _PART.fullmatch(path.name)
        if place and (int(place[1]) >= size or int(place[2])):
            raise ValueError(f"{path} is of a save with other sizes than tensor_parallel_size={size}: {remedy}")


def _own_name(mpu: MPU) -> str:
    return f"pytorch_model_tp_{mpu.get_tensor_parallel_rank()}_pp_0.bin"


def _is_first(mpu: MPU) -> bool:
    return mpu.get_data_parallel_rank() == mpu.get_tensor_parallel_rank() == 0


def _configuration(model: PreTrainedModel) -> str:
    """Text of ``config.json``, as transformers' ``save_pretrained`` writes it."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    text: str = config.to_json_string(use_diff=True)
    return text


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory; a copy if its storage holds more than its elements."""
    host = tensor.detach().cpu()
    return host if host.untyped_storage().nbytes() == host.numel() * host.element_size() else host.clone()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return STORAGE_ADDRESS.of(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
