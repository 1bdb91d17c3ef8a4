"""The checkpoint that a path of a command means."""

from pathlib import Path

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.document import DOCUMENT, Document, parsed_document, read_document
from nxdpp.checkpoint.files.checksummed import DamagedFile


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a finished checkpoint of nxdpp, or has some."""
    return (path / DOCUMENT).is_file() or bool(directory.tags(path))


def opened(path: Path) -> tuple[Path, Document]:
    """Return the folder and the document of the checkpoint ``path``, or of the newest one in it.

    Raises ``DamagedFile`` for an unfinished or damaged one, and ``ValueError`` for a path without a checkpoint.
    """
    folder = path
    if not (path / DOCUMENT).is_file():
        found = directory.tags(path)
        if not found:
            raise _missing(path)
        folder = path / found[0]
    return folder, parsed_document(folder, read_document(folder))


def _missing(path: Path) -> ValueError:
    if not path.is_dir():
        return ValueError(f"{path} is not a directory: give a checkpoint, or the directory of a training's ones.")
    if any(directory.is_file_of_save(file.name) for file in path.iterdir()):
        return DamagedFile(f"{path} is unfinished: the save of it ended before {DOCUMENT} was written.")
    return ValueError(f"{path} has no checkpoint of nxdpp: neither {DOCUMENT} nor a directory with one.")
