"""Files of each tensor and pipeline rank, with the names of NeuronX Distributed's API guide.

::

    save_dir/tp_rank_00_pp_rank_00/checkpoint.pt
    save_dir/tp_rank_01_pp_rank_00/checkpoint.pt

A file has any dict of a program, as its rank has it, and only the same layout of ranks loads it. ``save_checkpoint``
is for any layout.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange, is_several
from nxdpp.ranks.faults.board import board
from nxdpp.tensor.padding import copy_own
from nxdpp.tensor.rank_files import check_loadable, local_path, mapped, rank_name, read_file, write_file
from nxdpp.tensor.tensor_attributes import is_tensor_parallel, whole_size

_FILE = "checkpoint.pt"
_XSER = (
    "{}=True is the format of torch_xla, which nxdpp does not have: leave it out, or use save_checkpoint, of which "
    "each rank writes its part."
)


def save(
    state_dict: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Write ``state_dict`` of each rank to a file of its own in ``save_dir``; collective over all ranks.

    A file is complete, or is the earlier one, at any moment. All of them are on the disk when the call returns.

    Args:
        state_dict: numbers, strings, tensors, and containers of them, by name.
        save_dir: directory of the files, made if it is missing.
        save_serially: one rank writes at a time.
        save_xser: refused: the format of torch_xla.
        down_cast_bf16: write float32 tensors in bfloat16.
        master_dp_only: only the first replica writes. ``False`` gives each replica files, ``..._dp_rank_00`` and so
            on: for the state of ZeRO-1.

    Raises:
        ValueError: before any file is written, for a value that only code can restore: a load runs none.
        OSError: on the rank that cannot write; the other ranks raise ``RuntimeError``.
    """
    if save_xser:
        raise ValueError(_XSER.format("save_xser"))
    parallel_state.refuse_in_debug("parallel_layers.save")
    writes = not master_dp_only or not is_several() or parallel_state.get_replica_rank() == 0
    path = _file(save_dir, master_dp_only)
    exchange = Exchange(consequence=f"{save_dir} was not written")

    def write(turn: int | None) -> None:
        if writes and turn in (None, exchange.rank):
            write_file(path, mapped(dict(state_dict), _in_bfloat16) if down_cast_bf16 else dict(state_dict))

    with board.call("save"):
        exchange.together(lambda: check_loadable(dict(state_dict)) if writes else None)
        turns: Sequence[int | None] = range(exchange.ranks) if save_serially else [None]
        for turn in turns:
            exchange.together(partial(write, turn))


def load(
    load_dir: str | os.PathLike[str],
    model_or_optimizer: nn.Module | Optimizer | None = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    model: nn.Module | Optimizer | None = None,
    master_dp_only: bool = True,
) -> Any:
    """Load the file that ``save`` has written for this rank; not collective. Runs no code of the file.

    Args:
        load_dir: directory of the files; with ``sharded=False`` one file with whole tensors.
        model_or_optimizer: gets the state under ``model_key``. Only the tensors it takes are in memory then.
        model_key: key of that state in the dict of ``save``; ``None`` if the file has only the state.
        load_xser: refused: the format of torch_xla.
        sharded: ``False`` gives each rank its part of whole tensors.
        strict: as of ``Module.load_state_dict``; an optimizer has no meaning for it.
        model: another name of ``model_or_optimizer``.
        master_dp_only: as of ``save``.

    Returns:
        The dict that was saved, without the state that was loaded.

    Raises:
        ValueError: for a damaged file, for values that only code can restore, for a missing key, and for whole tensors
            of a different shape.
        OSError: for a file that cannot be read.
        RuntimeError: of ``load_state_dict``, for names and shapes that do not fit.
    """
    if load_xser:
        raise ValueError(_XSER.format("load_xser"))
    if model is not None and model_or_optimizer is not None:
        raise ValueError("model and model_or_optimizer are two names of one argument: give one of them.")
    target = model_or_optimizer if model is None else model
    if not sharded and not isinstance(target, nn.Module):
        raise ValueError("sharded=False divides whole tensors as a model has them: give model=.")
    path = _file(load_dir, master_dp_only) if sharded else local_path(load_dir)
    content = read_file(path, in_file=target is not None)
    if target is None:
        return content
    state = content if model_key is None else _taken(content, model_key, path)
    if isinstance(target, Optimizer):
        target.load_state_dict(mapped(state, torch.clone))
    else:
        target.load_state_dict(state if sharded else _divided(state, target), strict=strict)
    return None if model_key is None else mapped(content, torch.clone)


def _file(directory: str | os.PathLike[str], master_dp_only: bool) -> Path:
    if not (is_several() or parallel_state.is_debug()):
        return local_path(directory) / rank_name(0, 0, None if master_dp_only else 0) / _FILE
    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    data = None if master_dp_only else parallel_state.get_replica_rank()
    return local_path(directory) / rank_name(tensor, pipeline, data) / _FILE


def _in_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().bfloat16() if tensor.dtype == torch.float32 else tensor


def _taken(content: Any, key: str, path: Path) -> Any:
    if not isinstance(content, dict) or key not in content:
        known = ", ".join(map(repr, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} has no key {key!r}, but {known:.300}: give the key of the save as model_key.")
    return content.pop(key)


def _divided(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """This rank's parts of the whole tensors of ``state``. Raises ``ValueError`` for a different shape."""
    local = getattr(model, "local_module", model)
    own = local.state_dict(keep_vars=True)
    return {
        name: _part(name, value, own[name]) if name in own and is_tensor_parallel(own[name]) else value
        for name, value in state.items()
    }


def _part(name: str, whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of ``whole`` that ``parameter`` has; padding becomes zero."""
    dim = vars(parameter)["partition_dim"] % parameter.ndim
    expected = (*parameter.shape[:dim], whole_size(parameter), *parameter.shape[dim + 1 :])
    if tuple(whole.shape) != expected:
        raise ValueError(
            f"{name} is of shape {list(whole.shape)} in the file, and the whole of this model has {list(expected)}: "
            f"build the model that was saved. Nothing was loaded."
        )
    part = torch.zeros(parameter.shape, dtype=whole.dtype)
    copy_own(whole, part, parameter)
    return part
