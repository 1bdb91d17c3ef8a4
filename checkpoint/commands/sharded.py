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

from nxdpp.checkpoint.commands.meta_model import meta_model, with_dtypes
from nxdpp.checkpoint.commands.opened import opened
from nxdpp.checkpoint.commands.plain_model import plain_model
from nxdpp.checkpoint.commands.source import Source, check_free
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.document import OF_MODEL, tensors_of, write_document
from nxdpp.checkpoint.distributed.document_head import DOCUMENT
from nxdpp.checkpoint.distributed.load import read_plan
from nxdpp.checkpoint.distributed.planners import BlocksLoadPlanner
from nxdpp.checkpoint.distributed.tensor_blocks import whole
from nxdpp.checkpoint.files.checksummed import write_streamed
from nxdpp.checkpoint.files.layout import Layout


def sharded_source(path: Path, config: Path | None, plain: bool = False) -> Source:
    """Return the model of the checkpoint ``path``, as ``plain`` tensors by their own names or of its configuration.

    Raises ``ValueError`` for one without a model, and where its tensors are not those of the configuration.
    """
    folder, document = opened(path)
    content, metadata = document.content, document.metadata
    if content["ties"] is None:
        raise ValueError(f"{folder} has no model to convert.")
    saved = {
        name.removeprefix(OF_MODEL): tensor
        for name, tensor in tensors_of(metadata).items()
        if name.startswith(OF_MODEL)
    }
    if plain:
        whole_ones = {name: Layout(tuple(tensor.size), tensor.properties.dtype) for name, tensor in saved.items()}
        model = plain_model(whole_ones, content["ties"], folder)
    else:
        model = meta_model(content.get("configuration"), config, folder)
    sources = model.sources({name: tensor.size for name, tensor in saved.items()}, content["ties"], folder)
    layouts = {
        name: Layout(tuple(saved[source].size), saved[source].properties.dtype) for name, source in sources.items()
    }
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
    """Write a checkpoint with the model alone, which ``load_checkpoint`` reads in any layout of ranks.

    Raises ``ValueError`` where there is one, and ``OSError`` if it cannot be written.
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


def _whole_tensor(layout: Layout) -> TensorStorageMetadata:
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
