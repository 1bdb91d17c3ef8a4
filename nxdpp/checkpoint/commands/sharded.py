"""Model of a checkpoint of nxdpp, as source and as destination of a conversion."""

import secrets
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxdpp.checkpoint.commands.formats import opened
from nxdpp.checkpoint.commands.source import Source, check_free, meta_model, plain_model, with_dtypes
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import OF_MODEL, write_document
from nxdpp.checkpoint.distributed.load import read_plan
from nxdpp.checkpoint.distributed.rectangles import BlocksLoadPlanner, whole
from nxdpp.checkpoint.files.checksummed_writer import write_streamed
from nxdpp.checkpoint.files.layout import StoredLayout


def sharded_source(path: Path, config: Path | None, plain: bool = False) -> Source:
    """Return the model of the checkpoint ``path``, as ``plain`` tensors by their own names or of its configuration.

    Raises ``ValueError`` for a checkpoint without a model, and where its tensors do not fit the configuration.
    """
    folder, document = opened(path)
    content, metadata = document.content, document.metadata
    if content["ties"] is None:
        raise ValueError(f"{folder} has no model to convert.")
    saved = document.layouts(OF_MODEL)
    if plain:
        model = plain_model(saved, content["ties"], folder)
    else:
        model = meta_model(content.get("configuration"), config, folder)
    sources = model.sources({name: each.shape for name, each in saved.items()}, content["ties"], folder)
    layouts = {name: saved[source] for name, source in sources.items()}
    with_dtypes(model, layouts)

    def read(name: str) -> torch.Tensor:
        full = f"{OF_MODEL}{sources[name]}"
        values = torch.empty(layouts[name].shape, dtype=layouts[name].dtype)
        planner = BlocksLoadPlanner()
        planner.set_up_planner({full: whole(values)}, metadata)
        read_plan(folder, metadata, planner, planner.create_local_plan())
        return values

    return Source(model, layouts, read)


def write_sharded(source: Source, destination: Path) -> None:
    """Write a checkpoint with only the model, which ``load_checkpoint`` reads in any layout of ranks.

    Raises ``ValueError`` where there is one already, and ``OSError`` if it cannot be written.
    """
    check_free(destination, DOCUMENT)
    if not destination.name:
        raise ValueError(f"{destination} has no name, which is the tag of the checkpoint: give its absolute path.")
    destination.mkdir(parents=True, exist_ok=True)
    save = secrets.token_hex(4)
    file = destination / directory.file_name(save, 0)
    document = directory.new_document(destination, save)
    layouts = {f"{OF_MODEL}{name}": each for name, each in source.layouts.items()}
    try:
        spans = write_streamed(file, layouts, ((f"{OF_MODEL}{name}", source.read(name)) for name in source.layouts))
        metadata = Metadata({name: _whole_tensor(each) for name, each in layouts.items()})
        places = {MetadataIndex(name, torch.Size([0] * len(layouts[name].shape))): span for name, span in spans.items()}
        number = directory.next_number(destination.parent)
        write_document(document, number, _content(source), metadata, places)
    except BaseException:
        file.unlink(missing_ok=True)
        document.unlink(missing_ok=True)
        raise
    directory.put_document(destination, save)
    directory.flush_directory(destination)


def _whole_tensor(layout: StoredLayout) -> TensorStorageMetadata:
    size = torch.Size(layout.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=layout.dtype), size, [chunk])


def _content(source: Source) -> dict[str, Any]:
    absent = ("layout", "optimizer", "scheduler", "grad_scaler", "user_content")
    return {
        **dict.fromkeys(absent),
        "ties": source.model.tensors.ties,
        "configuration": source.model.texts or None,
        "random": [],
    }
