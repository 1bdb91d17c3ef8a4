"""The document of a checkpoint: each changed byte is found, and names of files stay in the directory."""

import json
import zlib
from collections.abc import Callable
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

from nxdpp.checkpoint.distributed.directory import DOCUMENT, number_of
from nxdpp.checkpoint.distributed.document import Document, parsed_document, read_document, tensors_of, write_document
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


def parsed(folder: Path) -> Document:
    return parsed_document(folder, read_document(folder))


def test_a_document_comes_back(folder: Path) -> None:
    document = parsed(folder)
    assert document.content == CONTENT
    assert {name: each.shape for name, each in document.layouts("model.").items()} == {"weight": (4, 3), "number": ()}
    assert tensors_of(document.metadata)["model.weight"].properties.dtype == torch.bfloat16
    index = MetadataIndex("model.weight", [2, 0])
    assert document.metadata.storage_data[index] == FileSpan("a-rank00001.safetensors", 64, 12, (0xFFFFFFFF,))
    assert document.metadata.storage_data[MetadataIndex("model.number", [])].checksums == (7,)
    assert number_of(folder) == 17


def test_each_changed_byte_and_each_truncation_is_found(folder: Path) -> None:
    whole = read_document(folder)
    others = [b"[]", b"null", b'"text"', b"{}", b'{"version": 1}', b"\xff\xfe", b"[" * 100_000]
    changed = [whole[:at] + bytes([whole[at] ^ (1, 0x20)[at % 2]]) + whole[at + 1 :] for at in range(len(whole))]
    for text in (*others, *changed, *(whole[:size] for size in range(0, len(whole), 7))):
        with pytest.raises(DamagedFile, match=str(folder / DOCUMENT)):
            parsed_document(folder, text)


def signed(document: dict[str, Any]) -> bytes:
    """The text of ``document`` with the checksum that it should have."""
    body = {key: value for key, value in document.items() if key != "checksum"}
    checksum = f"{zlib.crc32(json.dumps(body, separators=(',', ':')).encode()):08x}"
    return json.dumps(document | {"checksum": checksum}).encode()


def test_another_version_is_refused(folder: Path) -> None:
    text = signed(json.loads(read_document(folder)) | {"version": 2})
    with pytest.raises(ValueError, match=r"has version 2, and this nxdpp reads version 1: update nxdpp\.") as caught:
        parsed_document(folder, text)
    assert not isinstance(caught.value, DamagedFile)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The document after ``change`` of a block, with the checksum that it should have: made by hand, not damaged."""
    document = json.loads(read_document(folder))
    change(document["tensors"]["model.weight"]["blocks"][0])
    return signed(document)


@pytest.mark.parametrize(
    "change", [{"file": "../a-rank00000.safetensors"}, {"file": "/etc/passwd"}, {"file": ".."}, {"checksums": ""}]
)
def test_a_block_outside_of_the_directory_or_without_checksums_is_refused(change: dict[str, str], folder: Path) -> None:
    parsed_document(folder, rewritten(folder, lambda block: None))
    with pytest.raises(DamagedFile, match=r"a block of model\.weight"):
        parsed_document(folder, rewritten(folder, lambda block: block.update(change)))
