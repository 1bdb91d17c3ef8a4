"""Checkpoints that look whole, and the removal of older ones and of what unfinished saves have left.

::

    step_50    saved now                     kept
    step_40    truncated                     kept, and not counted
    step_30    looks whole                   kept: with num_kept_ckpts=2 the last one
    step_20    any                           removed: document first

Only files that a save has made are removed, and directories that are empty then. Links stay.

A checkpoint looks whole if its document is, and each file has all bytes that it names. Only a load finds a value that
has changed. This process remembers the checkpoints that it has found damaged.
"""

import hashlib
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, METADATA, SUFFIX, number_of
from nxdpp.checkpoint.distributed.document import parsed_document, read_document
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import FileSpan

_found_damaged: set[bytes] = set()


def prune(path: Path, kept: int | None, current: str, named: Iterable[str]) -> list[OSError]:
    """Remove the files of unfinished saves, and checkpoints older than the ``kept`` newest ones that look whole.

    ``kept=None`` keeps all. ``current`` is the tag of the checkpoint that was saved last, and ``named`` the files that
    its document names. Returns the errors of removals. The other removals still happen.
    """
    failures: list[OSError] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            failures.append(error)

    attempt(lambda: _remove_files(path / current, set(named)))
    checkpoints = {folder.name for folder in directory.folders(path)}
    for found in list(path.iterdir()):
        if directory.is_new_latest(found.name) and found.is_file():
            attempt(found.unlink)
        elif found.name != current and found.name not in checkpoints and _may_be_ours(found):
            attempt(partial(_remove_files, found, set()))
    for tag in [] if kept is None else list(_superfluous(path, kept, current, checkpoints)):
        attempt(partial(_remove_checkpoint, path / tag))
    return failures


def _superfluous(path: Path, kept: int, current: str, checkpoints: Iterable[str]) -> Iterator[str]:
    """The tags after the ``kept`` newest checkpoints that look whole; tags without a number come last."""
    older = [tag for tag in checkpoints if tag != current and not (path / tag).is_symlink()]
    count = 1
    for tag in sorted(older, key=lambda tag: (number_of(path / tag), tag), reverse=True):
        if count >= kept:
            yield tag
        elif looks_whole(path / tag):
            count += 1


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It stops counting with the first step."""
    (folder / DOCUMENT).unlink(missing_ok=True)
    directory.flush_directory(folder)
    _remove_files(folder, set())


def _may_be_ours(folder: Path) -> bool:
    """Return whether ``folder`` is a directory that this process may list, with something in it."""
    with suppress(PermissionError):
        return folder.is_dir() and not folder.is_symlink() and any(folder.iterdir())
    return False


def _remove_files(folder: Path, named: Collection[str]) -> None:
    """Remove the files of saves except ``named``, and the directory if that empties it."""
    ours = [each for each in folder.iterdir() if directory.is_file_of_save(each.name) and each.name not in named]
    if any(each.suffix == SUFFIX for each in ours) and not any(name.endswith(SUFFIX) for name in named):
        # It names the others.
        ours = [*folder.glob(f"{METADATA}*"), *ours]
    for file in ours:
        file.unlink(missing_ok=True)
    if ours and not any(folder.iterdir()):
        folder.rmdir()


def looks_whole(folder: Path) -> bool:
    """Return whether the checkpoint in ``folder`` can be whole; not collective."""
    try:
        identity = _identity(folder)
        if identity in _found_damaged:
            return False
        return all((folder / file).stat().st_size >= end for file, end in _ends(folder, identity).items())
    except (OSError, ValueError):
        return False


def check_files(folder: Path, metadata: Metadata) -> None:
    """Raise ``DamagedFile`` for a file in ``folder`` that is missing, is no file, or lacks bytes of ``metadata``."""
    for name, end in ends_of(metadata.storage_data).items():
        path = folder / name
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise DamagedFile(
                f"{path} is missing, or this host does not share the directory with the ranks that saved."
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFile(f"{path} is not a file.")
        if found.st_size < end:
            raise DamagedFile(f"{path} is truncated: it has {found.st_size} bytes, and {end} are needed.")


def keep_damaged(folder: Path) -> None:
    """Remember that a load has found the checkpoint in ``folder`` damaged, as it is now."""
    try:
        _found_damaged.add(_identity(folder))
    except (OSError, ValueError):
        return


def ends_of(spans: Mapping[MetadataIndex, FileSpan]) -> dict[str, int]:
    """The number of bytes of each file that ``spans`` are in."""
    ends: dict[str, int] = {}
    for span in spans.values():
        ends[span.file] = max(ends.get(span.file, 0), span.start + span.length)
    return ends


def _identity(folder: Path) -> bytes:
    """Distinguishes the document from one that replaces it; equal for two local copies of a store's document."""
    return hashlib.blake2b(read_document(folder)).digest()


@lru_cache(maxsize=64)
def _ends(folder: Path, _: bytes) -> dict[str, int]:
    return ends_of(parsed_document(folder, read_document(folder)).metadata.storage_data)
