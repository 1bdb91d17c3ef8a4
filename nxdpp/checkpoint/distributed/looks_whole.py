"""Look at a checkpoint without its values: its document is whole, and each file has all bytes that it names.

Only a load finds a value that has changed. This process remembers the checkpoints that it has found damaged.
"""

import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import parsed_document, read_document
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import FileSpan

_Identity = tuple[int, int, int]

_found_damaged: set[_Identity] = set()


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
    except OSError:
        return


def ends_of(spans: Mapping[MetadataIndex, FileSpan]) -> dict[str, int]:
    """The number of bytes of each file that ``spans`` are in."""
    ends: dict[str, int] = {}
    for span in spans.values():
        ends[span.file] = max(ends.get(span.file, 0), span.start + span.length)
    return ends


def _identity(folder: Path) -> _Identity:
    """Distinguishes the document from one that replaces it."""
    found = (folder / DOCUMENT).stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=64)
def _ends(folder: Path, _: _Identity) -> dict[str, int]:
    return ends_of(parsed_document(folder, read_document(folder)).metadata.storage_data)
