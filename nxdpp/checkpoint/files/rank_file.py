"""Files of NeuronX Distributed's ranks: of ``torch.save``, each with a dict of tensors.

::

    tp_rank_01_pp_rank_00/checkpoint.pt                         parallel_layers.save
    tp_rank_01_pp_rank_00                                       the same with save_xser
    dp_rank_00_tp_rank_01_pp_rank_00.pt                         save_checkpoint, in TAG/model
    dp_rank_00_ep_rank_00_tp_rank_01_pp_rank_00.pt              the same with expert parallelism
    ... .tensors/tensor_7.pt                                    tensors of a file with save_xser or use_xser

A file is mapped into memory: its tensors take memory when they are read.
"""

import os
import re
from collections.abc import Mapping
from mmap import MAP_SHARED
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import StoredLayout, layouts_of
from nxdpp.ground.torch_names import FAKE_MODE
from nxdpp.tensor.rank_files import rank_name, read_file

KEY = "model"
FILE = "checkpoint.pt"
_NAME = re.compile(r"(?:dp_rank_0+_(?:ep_rank_(\d+)_)?)?tp_rank_(\d+)_pp_rank_(\d+)(?:\.pt)?")
_REFERENCE = "torch_xla.utils.serialization.TensorReference"

Paths = Mapping[tuple[int, int], Path]
"""The file of each tensor and pipeline rank."""


class _TensorReference:
    """The place of a tensor in a file of torch_xla: the number ``tid`` of the tensor's own file."""

    tid: int


def read_rank(path: Path, key: str | None = KEY) -> dict[str, torch.Tensor]:
    """Return the tensors of ``path``, or of its entry ``key`` where it has one; runs no code of the file.

    Raises ``ValueError`` for a damaged file, for one that needs code, and for one with other values than tensors.
    """
    tensors = path.with_name(f"{path.name}.tensors")
    if tensors.is_dir():
        with torch.serialization.safe_globals([(_TensorReference, _REFERENCE)]):
            content = read_file(path)
        content = _with_tensors(content, tensors)
    else:
        content = read_file(path, in_file=True)
    if isinstance(content, dict) and "param_groups" in content:
        raise ValueError(
            f"{path} is the state of an optimizer, and is not converted: NeuronX Distributed numbers its parameters in "
            f"the order of the script's groups, and a name of a parameter is in none of its files. Give the directory "
            f"model next to it; a training begins with a new optimizer."
        )
    if isinstance(content, dict) and isinstance(content.get(key), dict):
        content = content[key]
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a {type(content).__name__}, and a dict of tensors is needed.")
    others = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(
            f"{others[0]!r} in {path} is a {type(content[others[0]]).__name__}, and a model's state has tensors. It is "
            f"looked for under {key!r}: NxD's converter takes another entry by --model_key."
        )
    return dict(content)


class RankFile:
    """A file whose tensors are read and written one at a time: each time it is mapped anew, and memory is given back.

    Raises ``ValueError`` as ``read_rank``.
    """

    def __init__(self, path: Path, key: str = KEY) -> None:
        self._path, self._key = path, key
        self.layouts = layouts_of(read_rank(path, key))

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in the mapped file."""
        return read_rank(self._path, self._key)[name]

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write the values of a tensor of a new file."""
        with torch.serialization.set_default_mmap_options(MAP_SHARED):
            self.read(name).copy_(values)

    def flush(self) -> None:
        """Write the file to the disk."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())


def make_file(path: Path, layouts: Mapping[str, StoredLayout], key: str) -> RankFile:
    """Make a file with space for tensors under ``key``, whose values are written later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FAKE_MODE():
        state = {name: torch.empty(each.shape, dtype=each.dtype, device="cpu") for name, each in layouts.items()}
    with skip_data(materialize_fake_tensors=True):
        torch.save({key: state}, path)
    return RankFile(path, key)


def trainer_name(tensor: int, pipeline: int, expert: int | None = None) -> str:
    """Name of the file of a rank in ``save_checkpoint``'s directory of a model."""
    experts = "" if expert is None else f"ep_rank_{expert:02d}_"
    return f"dp_rank_00_{experts}tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def file_of_rank(path: Path, tensor: int, pipeline: int, expert: int = 0) -> Path:
    """Return the file of a rank in ``path``. Raises ``FileNotFoundError`` with names that it may have."""
    found = _files(path)
    file = found.get((tensor, pipeline, None)) or found.get((tensor, pipeline, expert))
    if file is None:
        names = f"{rank_name(tensor, pipeline)}/{FILE}, {trainer_name(tensor, pipeline, expert)}"
        raise FileNotFoundError(f"{path} has none of {names}: give the files of all ranks of one save.")
    return file


def rank_files(path: Path) -> Paths:
    """Return the files of ranks in ``path``; empty if there are none. Raises ``DamagedFile`` for missing ranks."""
    found = {(tensor, pipeline): file for (tensor, pipeline, expert), file in _files(path).items() if expert is None}
    if found:
        tensor, pipeline = (max(place[at] for place in found) + 1 for at in (0, 1))
        missing = [rank_name(t, p) for t in range(tensor) for p in range(pipeline) if (t, p) not in found]
        if missing:
            raise DamagedFile(f"{path} lacks the files of {', '.join(missing[:5])}: copy those of all ranks.")
    return found


def _files(path: Path) -> dict[tuple[int, int, int | None], Path]:
    """The file of each tensor, pipeline and expert rank; ``None`` for a name without the last one."""
    found: dict[tuple[int, int, int | None], Path] = {}
    for folder in (path, path / "model"):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            file = entry / FILE if entry.is_dir() else entry
            if (match := _NAME.fullmatch(entry.name)) and file.is_file():
                expert = None if match[1] is None else int(match[1])
                found.setdefault((int(match[2]), int(match[3]), expert), file)
    return found


def _with_tensors(content: Any, folder: Path) -> Any:
    """Return ``content`` with the tensors that it refers to."""
    if isinstance(content, _TensorReference):
        return read_file(folder / f"tensor_{int(content.tid)}.pt", in_file=True)
    if isinstance(content, dict):
        return {name: _with_tensors(value, folder) for name, value in content.items()}
    return content
