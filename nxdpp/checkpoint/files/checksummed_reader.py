"""Reads of ranges of safetensors files, each piece of which is compared with the checksum from its write."""

import errno
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nxdpp.checkpoint.files import pieces
from nxdpp.checkpoint.files.pieces import FileSpan

_THREADS = 2
"""Pieces that are read, and whose checksums are taken, at the same time."""


_LARGEST_HEADER = 100_000_008
"""The limit of the safetensors library, with the length before it."""


class DamagedFile(ValueError):
    """A file of a checkpoint is missing, is shorter than it was, has other bytes, or its disk does not give them."""


@dataclass
class ChecksummedReader:
    """Reader of spans in the files of ``directory`` that compares the checksum of each piece.

    A span of a file without checksums is not compared. One file is open at a time, and one piece is kept. Threads read
    whole pieces right into the destination: it has its values after ``wait``, or at the end of the block. Raises
    ``DamagedFile`` and ``OSError``.
    """

    directory: Path
    elsewhere: Callable[[Path, int, memoryview], int] | None = None
    """Reads bytes of a file that is not on a file system, from a place on, and returns their number."""

    def __post_init__(self) -> None:
        self._name: str | None = None
        self._descriptor = -1
        self._kept: tuple[FileSpan, int] | None = None
        self._piece = bytearray()
        self._pool = ThreadPoolExecutor(_THREADS)
        self._reads: deque[Future[None]] = deque()

    def __enter__(self) -> "ChecksummedReader":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            # Waits for the reads that have begun: the memory may be used again after an error.
            self._pool.shutdown(cancel_futures=True)
            self._close()

    def wait(self) -> None:
        """Wait until all destinations have their values, and raise the first error."""
        while self._reads:
            self._reads.popleft().result()

    def read(self, span: FileSpan, start: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``span`` from ``start`` on."""
        stop, done = start + len(destination), 0
        while start + done < stop:
            number, skipped = divmod(start + done, pieces.PIECE_BYTES)
            first, last = number * pieces.PIECE_BYTES, min((number + 1) * pieces.PIECE_BYTES, span.length)
            count = min(last, stop) - start - done
            into = destination[done : done + count]
            if count == last - first:
                self._read_whole(span, number, into)
            else:
                self._keep(span, number, last - first)
                into[:] = memoryview(self._piece)[skipped : skipped + count]
            done += count

    def verify(self, span: FileSpan) -> None:
        """Read all bytes of ``span``."""
        for number in range(len(span.checksums)):
            self._keep(span, number, min((number + 1) * pieces.PIECE_BYTES, span.length) - number * pieces.PIECE_BYTES)

    def verify_header(self, name: str, length: int, header: Mapping[str, object]) -> None:
        """Compare the first ``length`` bytes of the file ``name`` with the ``header`` that they should have."""
        self._open(name)
        found = bytearray(min(length, _LARGEST_HEADER))
        count = pieces.read_bytes(self._descriptor, 0, memoryview(found))
        with suppress(ValueError, RecursionError):
            if count == length == 8 + int.from_bytes(found[:8], "little") and json.loads(found[8:]) == header:
                return
        raise DamagedFile(f"{self.directory / name} is damaged: its header does not have the tensors of the document.")

    def _read_whole(self, span: FileSpan, number: int, into: memoryview) -> None:
        """Read a whole piece; a large one in a thread."""
        self._open(span.file)
        if len(into) < pieces.SMALL_BYTES:
            self._fill(span, number, into)
            return
        self._reads.append(self._pool.submit(self._fill, span, number, into))
        # An error ends the reads soon.
        while len(self._reads) > 2 * _THREADS:
            self._reads.popleft().result()

    def _keep(self, span: FileSpan, number: int, length: int) -> None:
        if self._kept == (span, number):
            return
        self._kept = None
        if len(self._piece) != length:
            self._piece = bytearray(length)
        self._open(span.file)
        self._fill(span, number, memoryview(self._piece))
        self._kept = span, number

    def _fill(self, span: FileSpan, number: int, into: memoryview) -> None:
        """Read a whole piece of the open file."""
        place = span.start + number * pieces.PIECE_BYTES
        try:
            if self.elsewhere is None:
                count = pieces.read_bytes(self._descriptor, place, into)
            else:
                count = self.elsewhere(self.directory / span.file, place, into)
        except OSError as error:
            if error.errno != errno.EIO or self.elsewhere is not None:
                raise
            raise DamagedFile(f"{self.directory / span.file} cannot be read ({error}): its disk fails.") from error
        if count < len(into):
            size = place + count if self._descriptor < 0 else os.fstat(self._descriptor).st_size
            raise DamagedFile(
                f"{self.directory / span.file} is truncated: it has {size} bytes, and {place + len(into)} are needed."
            )
        if span.checksums and zlib.crc32(into) != span.checksums[number]:
            raise DamagedFile(
                f"{self.directory / span.file} is damaged: bytes {place} to {place + len(into)} have another checksum "
                f"than when they were written."
            )

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._name, self._descriptor = None, -1

    def _open(self, name: str) -> None:
        if name == self._name:
            return
        self.wait()
        self._close()
        try:
            if self.elsewhere is None:
                # A pipe would wait for a writer.
                self._descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise DamagedFile(
                f"{self.directory / name} is missing, or this host does not share the directory with the ranks that "
                f"saved."
            ) from error
        self._name = name
