"""The document of a checkpoint, ``checkpoint.json``: everything except the values of tensors.

::

    {"format": "nxdpp", "version": 1, "number": 7, "checksum": "5d1e4f02",
     "content": {...}                        what the caller gives: step, layout, ties, optimizer, scheduler, ...
     "tensors": {"model.embed.weight": {
         "dtype": "float32", "shape": [256, 64],
         "blocks": [{"offsets": [0, 0], "sizes": [128, 64], "file": "rank00000.safetensors",
                     "start": 2048, "checksums": "8c3f01aa..."}]}}}
"""

import errno
import json
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from nxdpp.checkpoint.distributed.directory import DOCUMENT, METADATA, SUFFIX, has_files_of_torch, write_text
from nxdpp.checkpoint.distributed.document_checks import DIGITS, check_content, metadata_of
from nxdpp.checkpoint.distributed.rectangles import key_of
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.checksummed_writer import header_of
from nxdpp.checkpoint.files.pieces import FileSpan, StoredLayout, printable

OF_MODEL = "model."
"""Begins the name of each tensor of the model."""
OF_OPTIMIZER = "optimizer."
"""Begins the name of each tensor of the optimizer, followed by the name of the parameter and a key."""
_VERSION = 1
_SHOWN = 5


@dataclass(frozen=True)
class Document:
    """Content of a checkpoint, and the place of each rectangle of its tensors."""

    content: dict[str, Any]
    metadata: Metadata

    def layouts(self, prefix: str = "") -> dict[str, StoredLayout]:
        """Global shape and dtype of each tensor that begins with ``prefix``, by the rest of its name."""
        return {
            name.removeprefix(prefix): StoredLayout(tuple(tensor.size), tensor.properties.dtype)
            for name, tensor in tensors_of(self.metadata).items()
            if name.startswith(prefix)
        }

    def headers(self) -> dict[str, tuple[int, dict[str, object]]]:
        """The header of each file of safetensors by name, and the bytes before the values."""
        spans: dict[MetadataIndex, FileSpan] = self.metadata.storage_data
        layouts = {
            MetadataIndex(name, chunk.offsets): StoredLayout(tuple(chunk.sizes), tensor.properties.dtype)
            for name, tensor in tensors_of(self.metadata).items()
            for chunk in tensor.chunks
        }
        files: dict[str, dict[str, StoredLayout]] = {}
        starts: dict[str, int] = {}
        for index, span in sorted(spans.items(), key=lambda item: item[1][:3]):
            starts.setdefault(span.file, span.start)
            files.setdefault(span.file, {})[key_of(index)] = layouts[index]
        return {
            file: (starts[file], header_of(of_file)) for file, of_file in files.items() if not file.endswith(SUFFIX)
        }


def write_document(
    path: Path, number: int, content: dict[str, Any], metadata: Metadata, spans: dict[MetadataIndex, FileSpan]
) -> None:
    """Write the document to ``path`` and flush it to the disk. Raises ``OSError``.

    ``number`` is of the checkpoint in a training, in the order of saves. ``content`` is JSON of the caller.
    ``metadata`` has names, shapes, dtypes and rectangles of the tensors, ``spans`` the place of each rectangle.
    """
    tensors = {}
    for name, saved in tensors_of(metadata).items():
        blocks = []
        for chunk in saved.chunks:
            span = spans[MetadataIndex(name, chunk.offsets)]
            blocks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": span.file,
                    "start": span.start,
                    "checksums": "".join(f"{checksum:0{DIGITS}x}" for checksum in span.checksums),
                }
            )
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(saved.size), "blocks": blocks}
    head = {"format": "nxdpp", "version": _VERSION, "number": number}
    body = {"content": content, "tensors": tensors}
    checksum = _checksum({**head, **body})
    # json.dump has no fast encoder for a file.
    write_text(path, json.dumps({**head, "checksum": checksum, **body}, allow_nan=False))


def read_document(directory: Path) -> bytes:
    """Return the bytes of the document in ``directory``.

    Raises ``FileNotFoundError`` without one, ``DamagedFile`` if its disk fails, and ``OSError``.
    """
    path = directory / DOCUMENT
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Reading a pipe or a device may never end.
            raise DamagedFile(f"{path} is not a file.")
        if has_files_of_torch(directory):
            raise DamagedFile(
                f"{directory} has a checkpoint of nxdpp, and torch.distributed.checkpoint has saved there too: remove "
                f"{DOCUMENT} to load torch's, or {METADATA} to load nxdpp's."
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{directory} has no whole checkpoint: {path} is missing.{_beside(directory)}"
        ) from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedFile(f"{path} cannot be read ({error}): its disk fails.") from error


def parsed_document(directory: Path, text: bytes) -> Document:
    """Return the document of the checkpoint in ``directory``, which has the bytes ``text``.

    Raises ``DamagedFile`` for a damaged document, and ``ValueError`` for a different version.
    """
    path = directory / DOCUMENT
    try:
        parsed = json.loads(text)
        if parsed["format"] != "nxdpp":
            raise ValueError("its format is another one")
        checksum, version = parsed["checksum"], parsed["version"]
        if type(version) is not int or type(parsed["number"]) is not int:
            raise ValueError("its version or number is none")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{path} is not the document of a checkpoint, or is damaged ({error}).") from error
    # All versions have this checksum, so a damaged version number does not pass for a different version.
    if checksum != _checksum({key: value for key, value in parsed.items() if key != "checksum"}):
        raise DamagedFile(f"{path} is damaged: its checksum is another one.")
    if version != _VERSION:
        raise ValueError(f"{path} has version {version!r:.100}, and this nxdpp reads version {_VERSION}: update nxdpp.")
    try:
        document = Document(parsed["content"], metadata_of(parsed["tensors"]))
        check_content(document.content, tensors_of(document.metadata))
        return document
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged ({type(error).__name__}: {printable(error, 300)}).") from error


def _checksum(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, separators=(',', ':')).encode()):0{DIGITS}x}"


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The description of each tensor by name."""
    found = {}
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata), "a checkpoint has only tensors"
        found[name] = saved
    return found


def _beside(directory: Path) -> str:
    """A sentence with the tags next to ``directory``; empty without one."""
    tags = sorted(path.parent.name for path in directory.parent.glob(f"*/{DOCUMENT}"))
    more = f", and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else ""
    return f" {directory.parent} has {', '.join(tags[-_SHOWN:])}{more}." if tags else ""
