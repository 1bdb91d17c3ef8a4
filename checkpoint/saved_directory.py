"""The files of a checkpoint that several ranks write, which appear only once all are whole.

::

    model-00001-of-00002.safetensors.unfinished     each rank writes its own
    model-00001-of-00002.safetensors                rank 0 removes what was there and renames
    model.safetensors.index.json                    last: without it the directory is no checkpoint
"""

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.directory import INDEX_FILE, SINGLE_FILE
from nxdpp.checkpoint.save_plan import Shard
from nxdpp.checkpoint.shard_writer import write_shard

_UNFINISHED = ".unfinished"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class SavedDirectory:
    """``directory`` as it comes to hold ``shards``, given by the ranks that write them."""

    def __init__(self, directory: Path, shards: Mapping[int, Shard]) -> None:
        self._directory = directory
        self._shards = shards
        numbers = {rank: number for number, rank in enumerate(shards, start=1)}
        self._files = {rank: f"model-{numbers[rank]:05d}-of-{len(shards):05d}.safetensors" for rank in shards}
        if len(shards) == 1:
            self._files = dict.fromkeys(shards, SINGLE_FILE)

    def write(self, rank: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the shard of ``rank``, if it has one, under the name of an unfinished one."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if rank in self._shards:
            write_shard(self._unfinished(rank), self._shards[rank].layouts, tensors)

    def finish(self, module: nn.Module) -> None:
        """Make a checkpoint of ``module`` of what all ranks have written; on one rank.

        Raises ``RuntimeError`` where files of other ranks are not there to be seen.
        """
        unseen = [rank for rank in self._files if not self._unfinished(rank).is_file()]
        if unseen:
            raise RuntimeError(
                f"{self._unfinished(unseen[0])}, which rank {unseen[0]} has written, is not to be seen from rank 0: "
                f"all ranks must be given one directory that they share."
            )
        self._remove_unfinished_of_others()
        with tempfile.TemporaryDirectory(dir=self._directory, prefix=".configuration", suffix=_UNFINISHED) as folder:
            _write_configuration(module, Path(folder))
            index = self._write_index(module, Path(folder))
            self._remove_earlier()
            for file in sorted(Path(folder).iterdir()):
                if file != index:
                    file.replace(self._directory / file.name)
            for rank, name in self._files.items():
                self._unfinished(rank).replace(self._directory / name)
            if index is not None:
                index.replace(self._directory / INDEX_FILE)

    def remove_unfinished(self, rank: int) -> None:
        """Remove what ``write`` wrote on ``rank``, so far as it can be."""
        if rank in self._files:
            try:
                self._unfinished(rank).unlink(missing_ok=True)
            except OSError:
                # The error that led here is the one to be told.
                return

    def _unfinished(self, rank: int) -> Path:
        return self._directory / f"{self._files[rank]}{_UNFINISHED}"

    def _write_index(self, module: nn.Module, folder: Path) -> Path | None:
        if len(self._shards) == 1:
            return None
        layouts = {rank: shard.layouts for rank, shard in self._shards.items()}
        size = sum(layout.bytes for tensors in layouts.values() for layout in tensors.values())
        files = {name: self._files[rank] for rank, tensors in layouts.items() for name in tensors}
        content = {"metadata": {"total_size": size}, "weight_map": files}
        index = folder / INDEX_FILE
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return index

    def _remove_unfinished_of_others(self) -> None:
        """What a save that was killed has left."""
        own = {self._unfinished(rank) for rank in self._files}
        for path in list(self._directory.glob(f"*{_UNFINISHED}")):
            if path.is_dir():
                shutil.rmtree(path)
            elif path not in own:
                path.unlink()

    def _remove_earlier(self) -> None:
        """What would make a directory of old and new files look whole goes first."""
        for name in (INDEX_FILE, SINGLE_FILE):
            (self._directory / name).unlink(missing_ok=True)
        for file in list(self._directory.iterdir()):
            if _SHARD.fullmatch(file.name):
                file.unlink()


def _write_configuration(module: nn.Module, folder: Path) -> None:
    if not isinstance(module, PreTrainedModel):
        return
    configuration: Any = copy.deepcopy(module.config)
    # As transformers notes them on saving.
    configuration.dtype = str(module.dtype).removeprefix("torch.")
    configuration.architectures = [type(module).__name__]
    configuration.save_pretrained(folder)
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
