"""Files of a checkpoint that several ranks write, and that replace an earlier one only when all are complete.

::

    .unfinished/model-00001-of-00002.safetensors    each rank writes its files here
    model-00001-of-00002.safetensors                rank 0 moves them and replaces the index, see ``NewCheckpoint``

The folder is no checkpoint. The next save removes one that a killed save left.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.checksummed_writer import write_shard
from nxdpp.checkpoint.huggingface.read_directory import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    UNFINISHED,
)
from nxdpp.checkpoint.huggingface.replace_adapter import finish_adapter
from nxdpp.checkpoint.huggingface.replace_checkpoint import NewCheckpoint, finish_replacement
from nxdpp.checkpoint.huggingface.save_plan import Shard


def start_save(directory: Path, is_adapter: bool) -> None:
    """Make ``directory`` and an empty unfinished folder in it; rank 0 calls it before any rank writes.

    What a killed save left is completed where its checkpoint was valid, and is removed otherwise. ``is_adapter`` is for
    the files of an adapter at the top of ``directory``. Raises ``ValueError`` where files of a whole model are there,
    and the other way round.
    """
    unfinished = directory / UNFINISHED
    finish_adapter(directory)
    _refuse_other_kind(directory, is_adapter)
    directory.mkdir(parents=True, exist_ok=True)
    # A killed save also leaves temporary files of the library.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(exist_ok=True)
    finish_replacement(directory, unfinished)


def _refuse_other_kind(directory: Path, is_adapter: bool) -> None:
    """A load takes the adapter of a directory, also where the weights of a whole model are newer."""
    others = (SINGLE_FILE, INDEX_FILE) if is_adapter else (ADAPTER_CONFIG, ADAPTER_FILE)
    found = [name for name in others if (directory / name).is_file()]
    if found:
        held, saved = ("a whole model", "an adapter") if is_adapter else ("an adapter", "a whole model")
        raise ValueError(
            f"{directory} holds {held} ({' and '.join(found)}), and {saved} is saved: loads would find one of them. "
            f"Nothing was written. Give {saved} a directory of its own, or remove {' and '.join(found)} first."
        )


class SavedDirectory:
    """``directory`` while ``shards`` are written to it, one file for each."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self._directory = directory
        self._unfinished = directory / UNFINISHED
        count = len(shards)
        self._shards = {
            f"model-{number:05d}-of-{count:05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
        }

    def write(self, rank: int, tensors_of: Callable[[Shard], dict[str, torch.Tensor]], writer: int | None) -> None:
        """Write the shards of ``rank`` to the unfinished folder, one at a time, with the tensors of ``tensors_of``.

        ``start_save`` comes before on rank 0. ``tensors_of`` is collective over a tensor group; its ``writer`` writes.
        """
        self._unfinished.mkdir(parents=True, exist_ok=True)
        for file, shard in self._shards.items():
            if shard.rank == writer:
                # The tensors of one file are in memory at a time.
                if rank == writer:
                    write_shard(self._unfinished / file, tensors_of(shard))
                else:
                    tensors_of(shard)

    def files(self) -> list[tuple[Path, Shard]]:
        """The unfinished file of each shard."""
        return [(self._unfinished / name, shard) for name, shard in self._shards.items()]

    def finish(self, module: nn.Module, texts: Mapping[str, str] | None = None) -> None:
        """Complete the checkpoint of ``module`` after all ranks have written; rank 0 calls it.

        ``texts`` are the configuration's files by name, if they are not to come from ``module``.

        Raises ``RuntimeError`` if other ranks' files are not visible.
        """
        for name, shard in self._shards.items():
            if not (self._unfinished / name).is_file():
                raise RuntimeError(
                    f"{self._unfinished / name}, which rank {shard.rank} has written, is not visible to rank 0: "
                    f"give all ranks one shared directory."
                )
        with tempfile.TemporaryDirectory(dir=self._unfinished) as folder:
            configuration = Path(folder) / "configuration"
            configuration.mkdir()
            if texts is None:
                write_configuration(module, configuration)
            for name, text in (texts or {}).items():
                (configuration / name).write_text(text)
            shards = {self._unfinished / name: list(shard.layouts) for name, shard in self._shards.items()}
            size = sum(shard.bytes for shard in self._shards.values())
            NewCheckpoint(self._directory, Path(folder), shards, size).replace_earlier(sorted(configuration.iterdir()))
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


def write_configuration(module: nn.Module, folder: Path) -> None:
    """Write the files of a transformers model that are not weights; none for any other module."""
    if not isinstance(module, PreTrainedModel):
        return
    configuration: Any = copy.deepcopy(module.config)
    # transformers sets both when it saves.
    configuration.dtype = str(module.dtype).removeprefix("torch.")
    configuration.architectures = [type(module).__name__]
    configuration.save_pretrained(folder)
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
