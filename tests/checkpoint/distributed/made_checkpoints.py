"""Checkpoints of two files, made without a training."""

import zlib
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.document import write_document
from nxdpp.checkpoint.files.pieces import FileSpan

FOREIGN = ("notes.txt", "model.safetensors", "1f0c2a3b-rank0001.safetensors", ".1f0c-checkpoint.json", "latest.txt")
"""Names of files that no save has made."""

_VALUES = b"values.."
_CONTENT: dict[str, object] = {
    **dict.fromkeys(("layout", "ties", "configuration", "optimizer", "scheduler", "grad_scaler", "user_content")),
    "random": [],
}


def checkpoint(path: Path, tag: str, number: int, save: str = "0123abcd") -> set[str]:
    """Make a checkpoint that looks whole, and return the names of its files."""
    folder = path / tag
    folder.mkdir(parents=True, exist_ok=True)
    names = [directory.file_name(save, rank) for rank in range(2)]
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(2)]
    spans = {}
    for at, name in enumerate(names):
        (folder / name).write_bytes(_VALUES)
        spans[MetadataIndex("model.a", [at])] = FileSpan(name, 4, 4, (zlib.crc32(_VALUES[4:]),))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), chunks)
    # No two saves have the same document.
    content = {**_CONTENT, "user_content": str(folder)}
    write_document(directory.new_document(folder, save), number, content, Metadata({"model.a": tensor}), spans)
    directory.put_document(folder, save)
    return set(names)
