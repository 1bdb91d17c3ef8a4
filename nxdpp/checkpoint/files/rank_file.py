"""Files of NeuronX Distributed's ranks: of ``torch.save``, each with a dict of tensors.

They are read and written in pieces through a memory map.

Pages of a map count as memory of the process until the file is unmapped. So it is mapped again after 32 MiB, and
after each tensor of more than 1 MiB.
"""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import set_default_mmap_options, skip_data

from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import StoredLayout, layouts_of
from nxdpp.tensor.rank_files import rank_name, read_file

KEY = "model"
FILE = "checkpoint.pt"
_OF_TRAINER = re.compile(r"dp_rank_0+_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_OF_SAVE = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")

Paths = Mapping[tuple[int, int], Path]
"""The file of each tensor and pipeline rank."""
_MAPPED_BYTES = 1 << 25
_KEPT_BYTES = 1 << 20
_PIECE_BYTES = 1 << 23


class RankFile:
    """The tensors of one file, under ``key`` or in the dict of the file itself.

    Raises ``ValueError`` for a damaged file, for one that needs code, and for one that holds anything but tensors.
    """

    def __init__(self, path: Path, key: str = "model", writable: bool = False) -> None:
        self._path = path
        self._key = key
        self._writable = writable
        self._state: Mapping[str, torch.Tensor] | None = None
        self._used = 0
        state = self._mapped()
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{name} in {path} is a {type(value).__name__}, and a model's state has tensors.")
        self.layouts = layouts_of(state)

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The rows of a tensor in pieces, each with the number of its first row; they are in the map."""
        shape, dtype = self.layouts[name].shape, self.layouts[name].dtype
        if not shape:
            yield 0, self._mapped()[name].view(1)
            return
        row = dtype.itemsize * torch.Size(shape[1:]).numel()
        rows = max(1, _PIECE_BYTES // max(1, row))
        for start in range(0, shape[0], rows):
            yield start, self._mapped()[name][start : start + rows]
            self._used += rows * row
        if self._used > _KEPT_BYTES:
            # Other ranks' files are mapped too.
            self._state = None

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write the values of a tensor to the map."""
        rows = values if values.ndim else values.view(1)
        for start, piece in self.pieces(name):
            piece.copy_(rows[start : start + len(piece)])

    def read(self, name: str, into: torch.Tensor) -> None:
        """Read a tensor into memory of its shape."""
        rows = into if into.ndim else into.view(1)
        for start, piece in self.pieces(name):
            rows[start : start + len(piece)].copy_(piece)

    def equals(self, name: str, values: torch.Tensor) -> bool:
        """Return whether the tensor ``name`` equals ``values``."""
        rows = values if values.ndim else values.view(1)
        return all(torch.equal(rows[start : start + len(piece)], piece) for start, piece in self.pieces(name))

    def close(self) -> None:
        """Unmap the file, and write its pages to the disk."""
        self._state = None
        if self._writable:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

    def _mapped(self) -> Mapping[str, torch.Tensor]:
        if self._state is None or self._used > _MAPPED_BYTES:
            self._state, self._used = None, 0
            with set_default_mmap_options(mmap.MAP_SHARED) if self._writable else nullcontext():
                self._state = _state(read_file(self._path, in_file=True), self._key, self._path)
        return self._state


def make_file(path: Path, layouts: Mapping[str, StoredLayout], key: str) -> RankFile:
    """Make a file with space for tensors under ``key``, whose values are written to its ``pieces``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FakeTensorMode():
        state = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in layouts.items()}
    with skip_data(materialize_fake_tensors=True):
        torch.save({key: state}, path)
    return RankFile(path, key, writable=True)


def _state(content: Any, key: str, path: Path) -> Mapping[str, torch.Tensor]:
    """The dict of tensors in ``content``."""
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
                    f"{entry} is of torch_xla (save_xser=True, use_xser=True), whose files need its classes. Load the "
                    f"checkpoint with NeuronX Distributed, and save it with use_xser=False."
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
