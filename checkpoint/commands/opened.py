"""The checkpoint that a path of a command means."""

from pathlib import Path
from typing import Any

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.document import Document, parsed_document, read_document
from nxdpp.checkpoint.distributed.document_head import DOCUMENT
from nxdpp.checkpoint.files.checksummed import DamagedFile

_KINDS: dict[str, tuple[type, ...]] = {
    "layout": (dict,),
    "ties": (dict,),
    "configuration": (dict,),
    "optimizer": (dict,),
    "random": (list,),
}


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of nxdpp, has some, or has files of an unfinished one."""
    return (path / DOCUMENT).is_file() or bool(directory.tags(path)) or bool(unfinished(path))


def opened(path: Path) -> tuple[Path, Document]:
    """Return the folder and the document of the checkpoint ``path``, or of the newest one in it.

    Raises ``DamagedFile`` for an unfinished or damaged one, and ``ValueError`` for a path without a checkpoint.
    """
    folder = path
    if not (path / DOCUMENT).is_file():
        found = directory.tags(path)
        if not found:
            raise missing(path)
        folder = path / found[0]
    document = parsed_document(folder, read_document(folder))
    _check(folder, document.content)
    return folder, document


def unfinished(path: Path) -> list[Path]:
    """The directories without a document that have files of a save: ``path``, or those in it."""
    if not path.is_dir():
        return []
    return [folder for folder in (path, *sorted(path.iterdir())) if _is_unfinished(folder)]


def _is_unfinished(folder: Path) -> bool:
    try:
        names = {file.name for file in folder.iterdir()}
    except OSError:
        # A file, or a directory that this process may not search.
        return False
    return DOCUMENT not in names and any(map(directory.is_file_of_save, names))


def missing(path: Path) -> ValueError:
    """The error for a ``path`` without a checkpoint; ``DamagedFile`` for an unfinished one."""
    if not path.is_dir():
        return ValueError(f"{path} is not a directory: give a checkpoint, or the directory of a training's ones.")
    for folder in unfinished(path):
        return DamagedFile(f"{folder} is unfinished: {DOCUMENT} is not written. The save goes on, or has ended early.")
    return ValueError(
        f"{path} has no checkpoint: neither {DOCUMENT} of nxdpp nor a directory with one, no model.safetensors of "
        f"Hugging Face, and no files of NeuronX Distributed's ranks."
    )


def _check(folder: Path, content: Any) -> None:
    """Raise ``DamagedFile`` for a content that no save has written."""
    for name, kinds in _KINDS.items():
        value = content.get(name) if isinstance(content, dict) else ...
        if value is not None and not isinstance(value, kinds):
            raise DamagedFile(f"{folder / DOCUMENT} is damaged: its {name} is another thing than saves write.")
