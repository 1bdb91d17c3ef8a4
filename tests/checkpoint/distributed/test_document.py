"""The document of a checkpoint: each changed byte and each truncation is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import parsed_document, read_document, write_document
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import FileSpan

CONTENT: dict[str, Any] = {
    **dict.fromkeys(("configuration", "optimizer", "scheduler", "grad_scaler")),
    **{"layout": None, "ties": {}, "random": [], "user_content": {"text": 'a "quoted" \n'}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chunks = [ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([2, 3])) for first in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4, 3]), chunks)
    number = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size([]), [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    )
    spans = {
        MetadataIndex("model.weight", [0, 0]): FileSpan("a-rank00000.safetensors", 96, 12, (0x0A,)),
        MetadataIndex("model.weight", [2, 0]): FileSpan("a-rank00001.safetensors", 64, 12, (0xFFFFFFFF,)),
        MetadataIndex("model.number", []): FileSpan("a-rank00000.safetensors", 108, 4, (7,)),
    }
    metadata = Metadata({"model.weight": tensor, "model.number": number})
    write_document(tmp_path / DOCUMENT, 17, CONTENT, metadata, spans)
    return tmp_path


def test_each_changed_byte_and_each_truncation_is_found(folder: Path) -> None:
    whole = read_document(folder)
    others = [b"[]", b"null", b'"text"', b"{}", b'{"version": 1}', b"\xff\xfe", b"[" * 100_000]
    changed = [whole[:at] + bytes([whole[at] ^ (1, 0x20)[at % 2]]) + whole[at + 1 :] for at in range(len(whole))]
    for text in (*others, *changed, *(whole[:size] for size in range(0, len(whole), 7))):
        with pytest.raises(DamagedFile, match=str(folder / DOCUMENT)):
            parsed_document(folder, text)
