"""Plan of a checkpoint's files, which several ranks write, and which replace an earlier one when all are complete.

The plan has for each file its tensors and the rank that writes it. It is equal on every rank.

::

    .unfinished/model-00001-of-00002.safetensors    each rank writes its files here
    model-00001-of-00002.safetensors                rank 0 moves them and replaces the index, see ``NewCheckpoint``

The folder is no checkpoint. The next save removes one that a killed save left.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from nxdpp.checkpoint.files.checksummed_writer import write_shard
from nxdpp.checkpoint.files.pieces import StoredLayout, layouts_of
from nxdpp.checkpoint.huggingface.adapter import finish_adapter
from nxdpp.checkpoint.huggingface.conversion import Conversion, saving_conversions
from nxdpp.checkpoint.huggingface.read_directory import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    UNFINISHED,
)
from nxdpp.checkpoint.huggingface.replace_checkpoint import NewCheckpoint, finish_replacement
from nxdpp.ground.transformers_names import IGNORED_ON_SAVE

# Largest file, unless one conversion makes more. A rank copies the tensors of one file at a time, so this is also the
# memory that it needs next to its model. transformers writes files of 50 GB.
SHARD_BYTES = 10**9


@dataclass
class Shard:
    """A file that ``rank`` writes: the conversions to run and the layouts of the tensors that they make."""

    rank: int
    conversions: list[Conversion] = field(default_factory=list)
    layouts: dict[str, StoredLayout] = field(default_factory=dict)
    bytes: int = 0

    def add(self, conversion: Conversion, made: Mapping[str, StoredLayout]) -> None:
        """Add ``conversion``, which makes the tensors ``made``."""
        self.conversions.append(conversion)
        self.layouts |= made
        self.bytes += _bytes(made)


def plan_shards(
    module: nn.Module,
    tied_names: Sequence[Sequence[str]],
    held: Sequence[Mapping[str, StoredLayout] | None],
    largest: int | None = None,
) -> list[Shard]:
    """Plan the files in the order of ranks; the first holder of a conversion's sources writes its results.

    ``held`` has for each rank its tensors under all their names, or None if the rank writes nothing. Conversions run
    on the meta device here. A file has at most ``largest`` bytes of values, 1 GB by default, or the tensors of one
    conversion.

    Raises ``NotImplementedError`` if no rank holds all sources of a conversion.
    """
    layouts: dict[str, StoredLayout] = {}
    for tensors in held:
        layouts = {**(tensors or {}), **layouts}
    mates = {name: names for names in tied_names for name in names}
    limit = SHARD_BYTES if largest is None else largest
    shards: dict[int, list[Shard]] = {}
    for conversion in saving_conversions(module, _names_to_save(module, list(layouts), tied_names)):
        rank = _first_holder(conversion, mates, held)
        made = layouts_of(conversion.convert(lambda name: layouts[name].on_meta(), module))
        of_rank = shards.setdefault(rank, [Shard(rank)])
        if of_rank[-1].layouts and of_rank[-1].bytes + _bytes(made) > limit:
            of_rank.append(Shard(rank))
        of_rank[-1].add(conversion, made)
    return [shard for _, of_rank in sorted(shards.items()) for shard in of_rank]


def _names_to_save(module: nn.Module, names: Sequence[str], tied_names: Sequence[Sequence[str]]) -> list[str]:
    """``names`` that are saved, with one name for each tied weight."""
    if not isinstance(module, PreTrainedModel):
        repeated = {name for group in tied_names for name in group[1:]}
        return [name for name in names if name not in repeated]
    ignored = set(IGNORED_ON_SAVE.of(module) or ())
    first = {name: group[0] for group in tied_names for name in group}
    # transformers compares the memory of tensors. The real ones are on several ranks, so small ones represent them.
    tokens = {name: torch.zeros(1) for name in names}
    state = {name: tokens[first.get(name, name)] for name in names if name not in ignored}
    return list(remove_tied_weights_from_state_dict(state, module))


def _first_holder(
    conversion: Conversion, mates: Mapping[str, Sequence[str]], held: Sequence[Mapping[str, StoredLayout] | None]
) -> int:
    for rank, tensors in enumerate(held):
        if tensors and all(any(mate in tensors for mate in mates.get(name, [name])) for name in conversion.names):
            return rank
    raise NotImplementedError(
        f"transformers saves {conversion.first} as one tensor made of {conversion.names}, which are on several ranks "
        f"here. This is not implemented: use fewer stages, or cut elsewhere (pipeline_cuts)."
    )


def _bytes(layouts: Mapping[str, StoredLayout]) -> int:
    return sum(layout.bytes for layout in layouts.values())


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
    if unfinished.is_symlink():
        unfinished.unlink()
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
        failed: Exception | None = None
        for file, shard in self._shards.items():
            if shard.rank == writer:
                # The tensors of one file are in memory at a time.
                tensors = tensors_of(shard)
                if rank == writer and failed is None:
                    try:
                        write_shard(self._unfinished / file, tensors)
                    except Exception as error:
                        # The other ranks of the group gather the rest.
                        failed = error
                del tensors
        if failed is not None:
            raise failed

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
