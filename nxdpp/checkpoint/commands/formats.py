"""The format of the files in a path of a command, and the checkpoint of nxdpp that it means."""

from pathlib import Path
from typing import Literal

from nxdpp.checkpoint.dcp.directory import has_dcp_files
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, METADATA
from nxdpp.checkpoint.distributed.document import Document, parsed_document, read_document
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.rank_file import rank_files
from nxdpp.checkpoint.huggingface.read_directory import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHTS_FIELD,
    adapter_weights,
    settings_of,
)

Format = Literal["nxdpp", "nxd", "huggingface", "dcp"]


def format_of(path: Path) -> Format:
    """Return the format of ``path``.

    Raises ``ValueError`` for a path without a checkpoint and for missing ranks, and ``DamagedFile`` for an unfinished
    checkpoint.
    """
    if (path / DOCUMENT).is_file() or directory.tags(path) or unfinished(path):
        return "nxdpp"
    if has_dcp_files(path):
        return "dcp"
    if rank_files(path):
        return "nxd"
    if _is_huggingface(path):
        return "huggingface"
    raise missing(path)


def _is_huggingface(path: Path) -> bool:
    """Return whether ``path`` has weights of a Hugging Face directory, or an adapter."""
    if not path.is_dir():
        return False
    weights = any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)) or any(path.glob("*.bin"))
    named = (path / CONFIG_FILE).is_file() and WEIGHTS_FIELD in settings_of(path)
    return weights or named or adapter_weights(path) is not None


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
    return folder, parsed_document(folder, read_document(folder))


def unfinished(path: Path) -> list[Path]:
    """The directories without a document that have files of a save: ``path``, or directories in it."""
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
        f"Hugging Face, no {METADATA} of torch.distributed.checkpoint, and no files of NeuronX Distributed's ranks."
    )
