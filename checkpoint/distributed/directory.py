"""The directory of a training's checkpoints, and the order in which a save makes files count.

::

    path/latest                                 tag of the newest checkpoint
    path/step_300/checkpoint.json               the document; a checkpoint is one that has it
    path/step_300/1f0c-rank00000.safetensors    values; the names are new with each save

A save writes the files, then the document, then ``latest``, and removes older checkpoints after that. Each name comes
by a rename. So a process that is killed at any moment leaves whole checkpoints, or files that no document names.
"""

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from nxdpp.checkpoint.distributed.document import DOCUMENT, number_of

LATEST = "latest"

_OURS = re.compile(rf"[0-9a-f]{{8}}-rank\d{{5,}}\.safetensors|\.[0-9a-f]{{8}}-{re.escape(DOCUMENT)}")
_NEW_LATEST = re.compile(rf"\.{LATEST}\.\d+")


def check_tag(tag: str) -> None:
    """Raise ``ValueError`` for a tag that is no name of a directory."""
    if not isinstance(tag, str) or not tag or tag in (".", "..", LATEST) or Path(tag).name != tag:
        raise ValueError(f"tag={tag!r} must be the name of a directory without a separator, such as 'step_100'.")


def new_document(folder: Path, save: str) -> Path:
    """Path of the document of a save before it counts."""
    return folder / f".{save}-{DOCUMENT}"


def put_document(folder: Path, save: str) -> None:
    """Make the checkpoint in ``folder`` count."""
    new_document(folder, save).rename(folder / DOCUMENT)
    flush_directory(folder)


def write_latest(path: Path, tag: str) -> None:
    """Name ``tag`` in ``latest``, by a rename."""
    new = path / f".{LATEST}.{os.getpid()}"
    with new.open("w", encoding="utf-8") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path / LATEST)
    flush_directory(path)


def tags(path: Path) -> list[str]:
    """Return the tags of the checkpoints in ``path``, the newest first: that in ``latest``, then by their numbers."""
    numbers = {folder.name: number_of(folder) for folder in _folders(path)}
    newest = latest(path)
    return sorted(numbers, key=lambda tag: (tag == newest, numbers[tag], tag), reverse=True)


def latest(path: Path) -> str | None:
    """Return the tag in ``latest``; ``None`` without one."""
    try:
        return (path / LATEST).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def file_name(save: str, rank: int) -> str:
    """Name of the file of ``rank`` in a save that is called ``save``: 8 hexadecimal digits."""
    return f"{save}-rank{rank:05d}.safetensors"


def is_file_of_save(name: str) -> bool:
    """Return whether a save gives this name to a file before the checkpoint counts."""
    return _OURS.fullmatch(name) is not None


def next_number(path: Path) -> int:
    """Return a number above that of each checkpoint in ``path``."""
    return max((number_of(folder) for folder in _folders(path)), default=0) + 1


def prune(path: Path, kept: int | None, current: str, named: Iterable[str]) -> None:
    """Remove what unfinished saves have left, and all but the ``kept`` newest checkpoints.

    Only files that a save has made are removed, and directories that are empty then. A checkpoint loses its document
    first.

    Args:
        path: directory of the checkpoints.
        kept: number of checkpoints to keep; ``None`` keeps all.
        current: tag of the checkpoint that was saved last.
        named: the files that its document names.
    """
    _remove_files(path / current, set(named))
    older = [tag for tag in tags(path) if tag != current]
    for found in list(path.iterdir()):
        if _NEW_LATEST.fullmatch(found.name):
            found.unlink(missing_ok=True)
        elif found.is_dir() and found.name not in (current, *older):
            with suppress(PermissionError):
                _remove_files(found, set())
    for tag in [] if kept is None else older[max(0, kept - 1) :]:
        (path / tag / DOCUMENT).unlink(missing_ok=True)
        flush_directory(path / tag)
        _remove_files(path / tag, set())


def flush_directory(folder: Path) -> None:
    """Write the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(path: Path) -> Iterator[Path]:
    """The directories that have a document."""
    if path.is_dir():
        # Path.is_file raises for a directory that this process may not search, such as lost+found.
        yield from (folder for folder in path.iterdir() if os.path.isfile(folder / DOCUMENT))


def _remove_files(folder: Path, named: Container[str]) -> None:
    """Remove the files of saves but ``named``, and the directory if it is empty then and had some."""
    ours = [file for file in folder.iterdir() if _OURS.fullmatch(file.name) and file.name not in named]
    for file in ours:
        file.unlink(missing_ok=True)
    if ours and not any(folder.iterdir()):
        folder.rmdir()
