"""A save whose files torch.distributed.checkpoint reads, with the names of one process; nxdpp reads it as any other.

::

    path/step_300/1f0c-rank00000.distcp    values, as torch.save writes them: the rectangles of each rank
    path/step_300/.metadata                names of model and optimizer, and the places of the zips
    path/step_300/checkpoint.json          all of the training, the places of values in the zips, and checksums
"""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nxdpp.checkpoint.dcp.optimizer_entries import torch_state
from nxdpp.checkpoint.distributed.captured import Described
from nxdpp.checkpoint.distributed.directory import METADATA, SUFFIX, new_document, put_file
from nxdpp.checkpoint.distributed.document import OF_MODEL, tensors_of
from nxdpp.checkpoint.distributed.rectangles import key_of
from nxdpp.checkpoint.distributed.save import Save
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.checkpoint.files.torch_saves import SavedSpan, write_saved
from nxdpp.ground.torch_names import STORAGE_INFO


class _StoredTensor(NamedTuple):
    """Place of a tensor of the checkpoint in a state dict, by its name there."""

    name: str


class DcpSave(Save):
    """One save into ``folder``; as ``Save``, and torch.distributed.checkpoint loads model and optimizer."""

    _suffix = SUFFIX
    # Of rank 0: the flat state dict, and the keys of each entry.
    _entries: Mapping[str, Any] = {}
    _paths: Mapping[str, Any] = {}

    def _plan_all(self, of_ranks: list[tuple[SavePlan, Described]]) -> Sequence[tuple[str, SavePlan]]:
        plans = super()._plan_all(of_ranks)
        tensors = tensors_of(self._metadata)
        names = [name.removeprefix(OF_MODEL) for name in tensors if name.startswith(OF_MODEL)]
        ties = self._content["ties"] or {}
        model = {name: _StoredTensor(f"{OF_MODEL}{ties.get(name, name)}") for name in (*names, *ties)}
        state: dict[str, Any] = {"model": model}
        if self._content["optimizer"] is not None:
            state["optimizer"] = torch_state(self._content["optimizer"], of_ranks[0][1].names, _StoredTensor)
        flat = DefaultSavePlanner(flatten_sharded_tensors=False)
        flat.set_up_planner(state)
        self._entries, self._paths = flat.state_dict, flat.mappings
        return plans

    def _write_values(self, file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileSpan]:
        others: Iterable[tuple[str, Any]] = ()
        if self.exchange.rank == 0:
            others = (
                (_in_file(name), each) for name, each in self._entries.items() if not isinstance(each, _StoredTensor)
            )
        places = write_saved(file, itertools.chain(tensors.items(), others))
        self._told = {name: span for name, (span, _) in places.items()}
        found = {name: places[name][1] for name in tensors}
        return {name: span for name, span in found.items() if span is not None}

    def _write_documents(
        self, document: Path, number: int, spans: dict[MetadataIndex, FileSpan], told: list[Any]
    ) -> None:
        """Also write ``.metadata``, under a hidden name until the document makes the checkpoint count."""
        super()._write_documents(document, number, spans, told)
        saved: dict[str, SavedSpan] = {}
        for of_rank in told:
            saved |= of_rank
        tensors = tensors_of(self._metadata)
        described: dict[str, Any] = {}
        results = []
        for name, entry in self._entries.items():
            if isinstance(entry, _StoredTensor):
                described[name] = tensors[entry.name]
                places = [(chunk.offsets, MetadataIndex(entry.name, chunk.offsets)) for chunk in described[name].chunks]
                found = [(MetadataIndex(name, offsets), saved[key_of(index)]) for offsets, index in places]
            elif isinstance(entry, torch.Tensor):
                described[name] = _described(entry)
                found = [(MetadataIndex(name, torch.Size([0] * entry.ndim)), saved[_in_file(name)])]
            else:
                described[name] = BytesStorageMetadata()
                found = [(MetadataIndex(name), saved[_in_file(name)])]
            results += [WriteResult(index, span.length, STORAGE_INFO(*span)) for index, span in found]
        with TemporaryDirectory() as made:
            writer = FileSystemWriter(made)
            writer.set_up_storage_writer(True)
            writer.finish(Metadata(described, planner_data=self._paths), [results])
            content = (Path(made) / METADATA).read_bytes()
        with self._hidden.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _put_others(self) -> None:
        put_file(self._folder, self._name, METADATA)

    def _remove(self, file: Path) -> None:
        with suppress(OSError):
            self._hidden.unlink(missing_ok=True)
        super()._remove(file)

    @property
    def _hidden(self) -> Path:
        """Path of ``.metadata`` before the checkpoint counts."""
        return new_document(self._folder, self._name, METADATA)


def _in_file(name: str) -> str:
    """The key of an entry that is no tensor of the checkpoint, whose keys begin with other words."""
    return f"entry {name}"


def _described(value: torch.Tensor) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [chunk])
