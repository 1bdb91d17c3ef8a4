"""Directory of a training's checkpoints in a store of objects, such as ``s3://bucket/run``, through fsspec.

A store has neither locks nor renames. So saves and loads see a local folder with the same names::

    store                                 local folder, until the call ends
    run/latest                            the same
    run/step_300/checkpoint.json          the same, or its first bytes
    run/step_300/1f0c-rank00000.saf...    a file of that size without values; what is read comes from the store

An object is there when all of it is. So the order of a save makes a checkpoint count, as in a directory.
"""

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.distributed.directory import DOCUMENT, HEAD_BYTES, LATEST, is_file_of_save
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile

STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")
"""Schemes of stores that have a new object whole or not at all, and that tell an error of a listing."""


def check_address(address: str) -> None:
    """Raise ``ValueError`` for an address without a place in one of ``STORES``, or whose package is missing."""
    scheme, _, name = address.partition("://")
    if scheme not in STORES:
        raise ValueError(
            f"path={address!r} is in a store that may show a file before it is whole: give an address of one of "
            f"{', '.join(STORES)}, or a folder that all hosts share, such as a mounted bucket."
        )
    if not name:
        raise ValueError(f"path={address!r} has no name after '://': give the bucket and a folder in it.")
    if "::" in name or ".." in name.split("/"):
        raise ValueError(f"path={address!r} has a chain or a step upwards: give it without '::' and '..'.")
    _opened(address)


def _opened(address: str) -> tuple[Any, str]:
    """The file system of fsspec, and the path in it."""
    try:
        # It comes with torch, and only an address needs it.
        from fsspec.core import url_to_fs

        store, root = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"path={address!r} needs a package of fsspec, which this host does not have: {error}. Install it on all "
            f"hosts, such as s3fs for s3://, or give a folder that all hosts share."
        ) from error
    return store, root.rstrip("/")


@contextmanager
def staged(address: str) -> Iterator["RemoteDirectory"]:
    """Give the directory at ``address``, with a local folder below ``$TMPDIR`` until the end of the block.

    What killed processes of this host have left there is removed.
    """
    ours = f"nxdpp-{socket.gethostname()}-"
    for left in Path(tempfile.gettempdir()).iterdir():
        found = re.fullmatch(rf"{re.escape(ours)}(\d+)-\w{{8}}", left.name)
        if found and _has_ended(int(found[1])):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{ours}{os.getpid()}-") as staging:
        # The local folder has the address in its name, which errors show.
        yield RemoteDirectory(address, Path(staging, address.replace("://", "/")))


class RemoteDirectory:
    """A directory in a store; its methods take paths in the local folder, and raise ``OSError``. Not collective.

    Args:
        address: of the directory, with a scheme.
        local: the local folder.
    """

    def __init__(self, address: str, local: Path) -> None:
        self.address, self.local = address, local
        self._store, self._root = _opened(address)
        local.mkdir(parents=True)

    def fill(self, whole: bool) -> list[Path]:
        """Give the local folder the names in the store, and return the files of saves.

        Documents come with their first bytes, or ``whole``. Other files have their sizes.
        """
        with self._told("read", self.address):
            self._store.invalidate_cache()
            found = self._store.find(self._root, detail=True)
            root = f"{self._root}/"
            sizes = {
                path.removeprefix(root): int(each["size"] or 0) for path, each in found.items() if path.startswith(root)
            }
            names = [name for name in sizes if name == LATEST or _is_of_checkpoint(name)]
            for name in names:
                (self.local / name).parent.mkdir(exist_ok=True)
                with (self.local / name).open("wb") as file:
                    file.truncate(sizes[name])
            small = [name for name in names if name == LATEST or name.endswith(f"/{DOCUMENT}")]
            ends = [sizes[name] if whole or name == LATEST else min(sizes[name], HEAD_BYTES) for name in small]
            contents = self._store.cat_ranges([self._path(self.local / name) for name in small], [0] * len(small), ends)
            for name, content in zip(small, contents, strict=True):
                if isinstance(content, Exception):
                    raise content
                with (self.local / name).open("r+b") as file:
                    file.write(content)
        return [self.local / name for name in names if name != LATEST]

    def fetch(self, path: Path) -> None:
        """Read all of the document ``path``, if the store has it."""
        if path.is_file():
            with self._told("read", path):
                path.write_bytes(self._store.cat_file(self._path(path)))

    def read(self, path: Path, place: int, into: memoryview) -> int:
        """Fill ``into`` from the byte ``place`` of a file, and return the number of bytes."""
        try:
            with self._told("read", path):
                found = self._store.cat_file(self._path(path), start=place, end=place + len(into))
        except FileNotFoundError as error:
            raise DamagedFile(f"{error.strerror}. The file is missing.") from error
        into[: len(found)] = found
        return len(found)

    def upload(self, path: Path) -> None:
        """Send the file ``path``."""
        with self._told("write", path):
            self._store.put_file(os.fspath(path), self._path(path))

    def replace(self, path: Path) -> None:
        """Send the small file ``path``: the store has the earlier one or all of it at any moment."""
        with self._told("write", path):
            self._store.pipe_file(self._path(path), path.read_bytes())

    def has(self, path: Path) -> bool:
        """Return whether the store has the bytes of the file ``path``."""
        try:
            with self._told("read", path):
                return bool(self._store.cat_file(self._path(path)) == path.read_bytes())
        except FileNotFoundError:
            return False

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files; documents first."""
        for path in sorted(paths, key=lambda path: path.name != DOCUMENT):
            with self._told("remove", path):
                self._store.rm_file(self._path(path))

    def _path(self, path: Path) -> str:
        return f"{self._root}/{path.relative_to(self.local).as_posix()}"

    @contextmanager
    def _told(self, act: str, path: Path | str) -> Iterator[None]:
        """Raise an error of the store as an ``OSError`` with the address: libraries have classes of their own."""
        name = path if isinstance(path, str) else f"{self.address}/{path.relative_to(self.local).as_posix()}"
        try:
            yield
        except Exception as error:
            # Libraries make errors without a number.
            default = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
            number = (isinstance(error, OSError) and error.errno) or default
            raise OSError(number, f"cannot {act} {name}: {type(error).__name__}: {error}") from error


def _is_of_checkpoint(name: str) -> bool:
    tag, _, file = name.partition("/")
    return bool(tag) and (file == DOCUMENT or is_file_of_save(file))


def _has_ended(process: int) -> bool:
    """Return whether no process of this host has that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False
