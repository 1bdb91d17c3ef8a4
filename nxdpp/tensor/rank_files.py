"""Files that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads: loading them runs no code.

A value that such a load would refuse is refused before a file is written.
"""

import errno
import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxdpp.devices.kinds import readable
from nxdpp.gradients.state_part import StatePart
from nxdpp.ground.torch_names import STATE_VERSIONS

_TENSORS = (torch.Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict, StatePart)
_SEQUENCES = (list, tuple)


def rank_name(tensor: int, pipeline: int, data: int | None = None) -> str:
    """Name of the directory of a tensor and pipeline rank, and with ``data`` of one data-parallel rank of them."""
    name = f"tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}"
    return name if data is None else f"{name}_dp_rank_{data:02d}"


def local_path(path: str | os.PathLike[str]) -> Path:
    """``path`` as a ``Path``. Raises ``ValueError`` for one without a name, and for one of a store, such as ``s3://``."""
    name = os.fspath(path)
    if not name:
        raise ValueError("path='' has no name: give one, '.' for the working directory.")
    if store := re.match(r"[A-Za-z][\w+.:-]+:/", name):
        raise ValueError(
            f"path={name!r} is not on a file system, and would be a folder {store[0][:-1]!r} of this host: files "
            f"are locked, renamed and mapped, which a store of objects cannot. Give a folder that all hosts share, "
            f"such as a mounted bucket, and copy it from there."
        )
    return Path(name)


def check_loadable(content: Any, path: str = "state_dict") -> None:
    """Raise ``ValueError`` for a value in ``content`` that only code can restore, with its place."""
    if _is_loadable(content):
        return
    if type(content) in _MAPPINGS:
        for key, value in content.items():
            check_loadable(key, f"a key of {path}")
            check_loadable(value, f"{path}[{key!r}]")
    elif type(content) in _SEQUENCES:
        for number, value in enumerate(content):
            check_loadable(value, f"{path}[{number}]")
    raise ValueError(
        f"{path} is a {type(content).__module__}.{type(content).__qualname__}, which only code can restore, and a load "
        f"runs none. Give its content as numbers, strings, tensors, lists and dicts, such as vars(args)."
    )


def write_file(path: Path, content: Any) -> None:
    """Write ``content`` to ``path``, which has the earlier file or the new one at any moment.

    Raises ``ValueError`` for what ``check_loadable`` refuses, and ``OSError`` for a file that cannot be written.
    """
    check_loadable(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            torch.save(mapped(content, _without_rest_of_storage), file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_file(path: Path, in_file: bool = False) -> Any:
    """Return the content of ``path``, with its tensors on the CPU; runs no code of the file.

    With ``in_file`` the tensors are in the mapped file, and take memory when they are read.

    Raises ``ValueError`` for a damaged file and for one that needs code, and ``OSError`` for one that cannot be read.
    """
    with path.open("rb"):
        # torch reports a directory or a missing file differently.
        pass
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=in_file)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} has values that only code can restore, and a load runs none: {_first_line(error)} Save the file "
            f"again with plain values in their place."
        ) from error
    except (RuntimeError, EOFError, KeyError, OSError) as error:
        # torch seeks to places before the start of a truncated file.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is damaged, or not of torch.save: {_first_line(error)}") from error


def mapped(content: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``content`` with the result of ``act`` in the place of each tensor in its dicts, lists and tuples.

    A state dict of a rank's part becomes an ordinary one, for the file of this rank.
    """
    if type(content) in _TENSORS:
        return act(content)
    if type(content) in _MAPPINGS:
        kind = OrderedDict if type(content) is StatePart else type(content)
        made = kind((key, mapped(value, act)) for key, value in content.items())
        if STATE_VERSIONS.held_by(content):
            STATE_VERSIONS.set(made, STATE_VERSIONS.of(content))
        return made
    if type(content) in _SEQUENCES:
        return type(content)(mapped(value, act) for value in content)
    return content


def _is_loadable(content: Any) -> bool:
    """Write and load ``content`` with tensors without elements in the place of its tensors."""
    file = io.BytesIO()
    try:
        torch.save(mapped(content, lambda tensor: torch.empty(0, dtype=tensor.dtype)), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        # Classes raise what they like when they are pickled.
        return False
    return True


def _without_rest_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of a view: torch writes all memory that a view is part of."""
    tensor = readable(tensor).detach()
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.clone()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
