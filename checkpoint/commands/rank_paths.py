"""Paths of the files of NeuronX Distributed's ranks."""

import re
from collections.abc import Mapping
from pathlib import Path

from nxdpp.checkpoint.files.checksummed import DamagedFile
from nxdpp.parallel_layers.rank_files import rank_name

KEY = "model"
FILE = "checkpoint.pt"
_OF_TRAINER = re.compile(r"dp_rank_0+_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_OF_SAVE = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")

Paths = Mapping[tuple[int, int], Path]
"""The file of each tensor and pipeline rank."""


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
