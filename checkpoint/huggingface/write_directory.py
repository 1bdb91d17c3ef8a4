"""Files of a checkpoint that several ranks write, and that get their names only when all are complete.

::

    .unfinished/model-00001-of-00002.safetensors    each rank writes its files here
    model-00001-of-00002.safetensors                rank 0 removes the earlier checkpoint and renames the files
    model.safetensors.index.json                    renamed last: without it the directory is no checkpoint
"""

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.safetensors_writer import write_shard
from nxdpp.checkpoint.huggingface.read_directory import INDEX_FILE, SINGLE_FILE
from nxdpp.checkpoint.huggingface.save_plan import Shard

UNFINISHED = ".unfinished"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class SavedDirectory:
    """``directory`` while ``shards`` are written to it, one file for each."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self._directory = directory
        # A killed save also leaves temporary files of the library: the next save removes them with this folder.
        self._unfinished = directory / UNFINISHED
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        if len(shards) == 1:
            files = [SINGLE_FILE]
        self._shards = dict(zip(files, shards, strict=True))

    def write(self, rank: int, tensors_of: Callable[[Shard], dict[str, torch.Tensor]]) -> None:
        """Write the shards of ``rank`` to the unfinished folder, one at a time, with the tensors of ``tensors_of``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._unfinished.mkdir(exist_ok=True)
        for file, shard in self._shards.items():
            if shard.rank == rank:
                write_shard(self._unfinished / file, tensors_of(shard))

    def finish(self, module: nn.Module) -> None:
        """Complete the checkpoint of ``module`` after all ranks have written; rank 0 calls it.

        Raises ``RuntimeError`` if the files of other ranks are not visible.
        """
        for name, shard in self._shards.items():
            if not (self._unfinished / name).is_file():
                raise RuntimeError(
                    f"{self._unfinished / name}, which rank {shard.rank} has written, is not visible to rank 0: "
                    f"give all ranks one shared directory."
                )
        with tempfile.TemporaryDirectory(dir=self._unfinished) as folder:
            _write_configuration(module, Path(folder))
            index = self._write_index(module, Path(folder))
            self._remove_earlier()
            for file in sorted(Path(folder).iterdir()):
                if file != index:
                    file.replace(self._directory / file.name)
            for name in self._shards:
                (self._unfinished / name).replace(self._directory / name)
            if index is not None:
                index.replace(self._directory / INDEX_FILE)
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def remove_unfinished(self, rank: int) -> None:
        """Remove the files that ``write`` wrote on ``rank``, as far as possible."""
        try:
            for file, shard in self._shards.items():
                if shard.rank == rank:
                    (self._unfinished / file).unlink(missing_ok=True)
            self._unfinished.rmdir()
        except OSError:
            # The caller raises the first error. Only the last rank finds the folder empty.
            return

    def _write_index(self, module: nn.Module, folder: Path) -> Path | None:
        if len(self._shards) == 1:
            return None
        size = sum(shard.bytes for shard in self._shards.values())
        files = {name: file for file, shard in self._shards.items() for name in shard.layouts}
        content = {"metadata": {"total_size": size}, "weight_map": files}
        index = folder / INDEX_FILE
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return index

    def _remove_earlier(self) -> None:
        """Remove the earlier checkpoint, its index first: a mixture of old and new files must not look complete."""
        for name in (INDEX_FILE, SINGLE_FILE):
            (self._directory / name).unlink(missing_ok=True)
        for file in list(self._directory.iterdir()):
            if _SHARD.fullmatch(file.name):
                file.unlink()


def _write_configuration(module: nn.Module, folder: Path) -> None:
    if not isinstance(module, PreTrainedModel):
        return
    configuration: Any = copy.deepcopy(module.config)
    # transformers sets both when it saves.
    configuration.dtype = str(module.dtype).removeprefix("torch.")
    configuration.architectures = [type(module).__name__]
    configuration.save_pretrained(folder)
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
