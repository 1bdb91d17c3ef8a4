"""Files of NeuronX Distributed's ranks: of ``torch.save``, each with a dict of tensors.

A file is loaded and saved without values first, which tells the place of each tensor. Then tensors are read or written
one at a time.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import StoredLayout, bytes_of, layouts_of, read_bytes
from nxdpp.ground.torch_names import FAKE_MODE, FILE_OFFSET
from nxdpp.tensor.rank_files import rank_name, read_file

KEY = "model"
FILE = "checkpoint.pt"
_OF_TRAINER = re.compile(r"dp_rank_0+_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_OF_SAVE = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")

Paths = Mapping[tuple[int, int], Path]
"""The file of each tensor and pipeline rank."""


class RankFile:
    """The tensors of one file, under ``key`` or in the dict of the file itself.

    Raises ``ValueError`` for a damaged file, for one that needs code, and for one that holds anything but tensors.
    """

    def __init__(self, path: Path, key: str = KEY) -> None:
        self._path = path
        with FAKE_MODE():
            self._tensors = _state(read_file(path), key, path)
        for name, value in self._tensors.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{name} in {path} is a {type(value).__name__}, and a model's state has tensors.")
            if FILE_OFFSET.of(value.untyped_storage()) is None:
                raise ValueError(f"{path} has the format of torch before 1.6: load and save it again with torch.")
        self.layouts = layouts_of(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor."""
        stored = self._tensors[name]
        steps = zip(stored.shape, stored.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in steps) if stored.numel() else 0
        values = torch.empty(count, dtype=stored.dtype, device="cpu")
        with self._path.open("rb") as file:
            if read_bytes(file.fileno(), self._place(stored), bytes_of(values)) < values.nbytes:
                raise ValueError(f"{self._path} is damaged: it ends before the values of {name}.")
        return values.as_strided(stored.shape, stored.stride())

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write the values of a tensor of a new file."""
        stored = self._tensors[name]
        assert (values.shape, values.dtype) == (stored.shape, stored.dtype), name
        with self._path.open("r+b") as file:
            file.seek(self._place(stored))
            file.write(bytes_of(values.contiguous()))

    def flush(self) -> None:
        """Write the file to the disk."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def _place(self, stored: torch.Tensor) -> int:
        """The byte of the file at which a tensor begins, of which torch tells the place of the storage."""
        start: int | None = FILE_OFFSET.of(stored.untyped_storage())
        assert start is not None, "the file has the place of each storage"
        return start + int(stored.storage_offset()) * stored.dtype.itemsize


def make_file(path: Path, layouts: Mapping[str, StoredLayout], key: str) -> RankFile:
    """Make a file with space for tensors under ``key``, whose values are written later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FAKE_MODE():
        state = {name: torch.empty(each.shape, dtype=each.dtype, device="cpu") for name, each in layouts.items()}
    with skip_data(materialize_fake_tensors=True):
        torch.save({key: state}, path)
    return RankFile(path, key)


def _state(content: Any, key: str, path: Path) -> Mapping[str, torch.Tensor]:
    if isinstance(content, dict) and isinstance(content.get(key), dict):
        content = content[key]
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a {type(content).__name__}, and a dict of tensors is needed.")
    return content


def rank_files(path: Path) -> Paths:
    """Return the files of ranks in ``path``; empty if there are none.

    Raises ``DamagedFile`` for missing ranks, and ``ValueError`` for the format of torch_xla.
    """
    found: dict[tuple[int, int], Path] = {}
    for folder in (path, path / "model"):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.name.endswith(".tensors"):
                raise ValueError(
                    f"{entry} is of torch_xla (save_xser=True, use_xser=True). Make plain files of it first: "
                    f"python -m nxdpp.scripts.checkpoint_converter --convert_from_xser."
                )
            if match := _OF_TRAINER.fullmatch(entry.name):
                found.setdefault((int(match[1]), int(match[2])), entry)
            elif (match := _OF_SAVE.fullmatch(entry.name)) and (entry / FILE).is_file():
                found.setdefault((int(match[1]), int(match[2])), entry / FILE)
    if found:
        tensor, pipeline = (max(place[at] for place in found) + 1 for at in (0, 1))
        missing = [rank_name(t, p) for t in range(tensor) for p in range(pipeline) if (t, p) not in found]
        if missing:
            raise DamagedFile(f"{path} lacks the files of {', '.join(missing[:5])}: copy those of all ranks.")
    return found
