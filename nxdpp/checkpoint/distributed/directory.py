"""The directory of a training's checkpoints, and the order in which a save makes files count.

::

    path/latest                                 tag of the newest checkpoint
    path/step_300/checkpoint.json               the document; a checkpoint is one that has it
    path/step_300/1f0c-rank00000.safetensors    values; the names are new with each save (.distcp: see dcp/save.py)

A save writes the files, then the document, then ``latest``, and removes older checkpoints after that. Each name comes
by a rename. So a process that is killed at any moment leaves whole checkpoints, or files that no document names.

::

    path/.lock                                  host and process; locked until that process ends, also by a kill

One program saves in a directory: two trainings would remove each other's files. Nothing here needs torch.
"""

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

DOCUMENT = "checkpoint.json"
LATEST = "latest"
LOCK = ".lock"
METADATA = ".metadata"
"""Names the values of a directory for torch.distributed.checkpoint."""
SUFFIX = ".distcp"
"""Ends the names of its files."""
HEAD_BYTES = 200
_BEGINNING = b'{"format": "nxdpp", '
_NUMBER = re.compile(rb'\{"format": "nxdpp", "version": \d+, "number": (\d+),')
_HIDDEN = "|".join(map(re.escape, (DOCUMENT, METADATA)))
_OURS = re.compile(rf"[0-9a-f]{{8}}-rank\d{{5,}}\.(safetensors|distcp)|\.[0-9a-f]{{8}}-({_HIDDEN})")
_NEW_LATEST = re.compile(rf"\.{LATEST}\.\d+")
_LONGEST_NAME = 255

_CLAIM_SECONDS = 10.0
"""Time that a process of the training before has to end."""

_held: dict[tuple[int, Path], int] = {}
_logger = logging.getLogger(__name__)


def number_of(directory: Path) -> int:
    """Return the number of the checkpoint in ``directory``; 0 where it cannot be read. Reads only the head."""
    found = _NUMBER.match(_head(directory))
    return int(found[1]) if found else 0


def _head(directory: Path) -> bytes:
    """The first bytes of the document in ``directory``; none where it cannot be read."""
    try:
        with (directory / DOCUMENT).open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def check_tag(tag: str) -> None:
    """Raise ``ValueError`` for a tag that is no plain name of a directory."""
    is_name = isinstance(tag, str) and Path(tag).name == tag and tag not in ("", ".", "..", LATEST, DOCUMENT)
    # ``latest`` holds the tag in a line of its own.
    is_plain = is_name and tag.isprintable() and tag == tag.strip() and len(tag.encode()) <= _LONGEST_NAME
    if not is_plain or _NEW_LATEST.fullmatch(tag):
        raise ValueError(
            f"tag={tag!r:.300} must be the name of a directory without a separator, such as 'step_100': printable, "
            f"without spaces at its ends, at most {_LONGEST_NAME} bytes."
        )


def check_directory(path: Path) -> None:
    """Raise ``NotADirectoryError`` if ``path``, or what it is in, is no directory."""
    found = next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), path)
    if os.path.lexists(found) and not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "checkpoints need a directory, and this is none", str(found))


def new_document(folder: Path, save: str, name: str = DOCUMENT) -> Path:
    """Path of the document of a save, or of the file ``name``, before it counts."""
    return folder / f".{save}-{name}"


def put_document(folder: Path, save: str) -> None:
    """Make the checkpoint in ``folder`` count. ``flush_directory`` then writes that to the disk."""
    flush_directory(folder)
    put_file(folder, save, DOCUMENT)


def put_file(folder: Path, save: str, name: str) -> None:
    """Give ``new_document`` its ``name``."""
    _rename(new_document(folder, save, name), folder / name)


def write_latest(path: Path, tag: str) -> None:
    """Name ``tag`` in ``latest``, by a rename."""
    new = path / f".{LATEST}.{os.getpid()}"
    new.unlink(missing_ok=True)
    write_text(new, tag)
    _rename(new, path / LATEST)
    flush_directory(path)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to the new file ``path``, and flush it to the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    """Rename a file. A network file system can report an error for a rename that it has done."""
    file = source.stat()
    try:
        source.rename(target)
    except OSError:
        with suppress(OSError):
            if os.path.samestat(file, target.stat()):
                return
        raise


def tags(path: Path) -> list[str]:
    """Return the tags of the checkpoints in ``path``, the newest first.

    The tag in ``latest`` is the newest. Documents without a number, which are damaged, come next. The rest follow in
    the order of the saves.
    """
    numbers = {folder.name: number_of(folder) for folder in folders(path)}
    newest = latest(path)
    return sorted(numbers, key=lambda tag: (tag == newest, not numbers[tag], numbers[tag], tag), reverse=True)


def tags_of_torch(path: Path) -> list[str]:
    """Return the names of the directories in ``path`` that only torch.distributed.checkpoint wrote, newest first."""
    found = [
        each
        for each in path.glob(f"*/{METADATA}")
        if has_files_of_torch(each.parent) and not (each.parent / DOCUMENT).exists()
    ]
    return [each.parent.name for each in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)]


def has_files_of_torch(folder: Path) -> bool:
    """Return whether torch.distributed.checkpoint has saved in ``folder`` itself."""
    names = [file.name for file in folder.glob(f"*{SUFFIX}")]
    return (folder / METADATA).is_file() and not all(map(_OURS.fullmatch, names))


def tags_to_load(path: Path) -> list[str]:
    """Return ``tags``, or else ``tags_of_torch``, and warn if the last save did not write the first one."""
    found, of_torch = tags(path), tags_of_torch(path)
    if not found:
        return of_torch
    if of_torch and (path / of_torch[0] / METADATA).stat().st_mtime > (path / found[0] / DOCUMENT).stat().st_mtime:
        _logger.warning(
            "%s has %s, and torch.distributed.checkpoint wrote %s later: give tag=%r to load that.",
            path,
            found[0],
            of_torch[0],
            of_torch[0],
        )
    later = [tag for tag in found if number_of(path / tag) > number_of(path / found[0])] if found else []
    if later:
        _logger.warning(
            "%s names %s, and %s was saved later: give tag=%r to load that.",
            path / LATEST,
            found[0],
            later[0],
            later[0],
        )
    return found


def latest(path: Path) -> str | None:
    """Return the tag in ``latest``; ``None`` without one."""
    if not os.path.isfile(path / LATEST):
        return None
    try:
        return (path / LATEST).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def file_name(save: str, rank: int, suffix: str = ".safetensors") -> str:
    """Name of the file of ``rank`` in a save that is called ``save``: 8 hexadecimal digits."""
    return f"{save}-rank{rank:05d}{suffix}"


def is_file_of_save(name: str) -> bool:
    """Return whether a save gives this name to a file before the checkpoint counts."""
    return _OURS.fullmatch(name) is not None


def is_new_latest(name: str) -> bool:
    """Return whether a save gives this name to ``latest`` before its rename."""
    return _NEW_LATEST.fullmatch(name) is not None


def next_number(path: Path) -> int:
    """Return a number above the numbers of all checkpoints in ``path``."""
    return max((number_of(folder) for folder in folders(path)), default=0) + 1


def flush_directory(folder: Path) -> None:
    """Write the names in ``folder`` to the disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def folders(path: Path) -> Iterator[Path]:
    """The directories in ``path`` that have a document of nxdpp, whole or not."""
    if path.is_dir():
        # Path.is_file raises for a directory that this process may not search, such as lost+found.
        yield from (folder for folder in path.iterdir() if os.path.isfile(folder / DOCUMENT) and _is_ours(folder))


def _is_ours(folder: Path) -> bool:
    """Return whether nxdpp wrote the document: by its head or, where that is damaged, by the files next to it."""
    if _head(folder).startswith(_BEGINNING):
        return True
    with suppress(OSError):
        return any(_OURS.fullmatch(name) for name in os.listdir(folder))
    return False


def claim(folder: Path) -> None:
    """Lock the directory of the checkpoint ``folder`` for this process, until it ends or calls ``release``.

    It is made if it is missing. A file system without locks is not locked.

    Raises ``RuntimeError`` if another process holds it. Raises ``OSError`` if it cannot be written, and for a link, a
    pipe or a device in the place of ``folder`` or the lock.
    """
    path = folder.parent
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
    file = path.resolve() / LOCK
    if has_files_of_torch(folder):
        raise OSError(
            errno.EEXIST,
            "torch.distributed.checkpoint has saved there, and would read its old values: give another tag",
            str(folder),
        )
    _refuse_others(folder, stat.S_ISDIR, "directory")
    _refuse_others(file, stat.S_ISREG, "file")
    key = os.getpid(), file
    if key in _held and _is_open(_held[key], file):
        return
    if key in _held:
        os.close(_held.pop(key))
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        _lock(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    _held[key] = descriptor


def _refuse_others(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    """Raise ``OSError`` for anything that is there and no ``kind``."""
    with suppress(FileNotFoundError):
        if not is_kind(path.lstat().st_mode):
            raise OSError(
                errno.EEXIST, f"it must be a {kind} of its own, and no link, pipe or device. Remove it", str(path)
            )


def release() -> None:
    """Give up the locks of this process."""
    for key in [key for key in _held if key[0] == os.getpid()]:
        os.close(_held.pop(key))


def _lock(descriptor: int, path: Path) -> None:
    end = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > end:
                text = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                holder = text if text and text.isprintable() else "another process"
                raise RuntimeError(
                    f"{holder} saves checkpoints in {path} at the same time: give each training a directory of its "
                    f"own, or end the other one. No checkpoint was made."
                ) from error
            time.sleep(0.1)
        except OSError:
            # This file system has no locks.
            return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _is_open(descriptor: int, file: Path) -> bool:
    """Return whether ``file`` is still the one that is open: the directory can have been replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
