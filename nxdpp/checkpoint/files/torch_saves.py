"""Values that ``torch.save`` writes into a file one after another, as torch.distributed.checkpoint has them.

::

    file    | zip of a tensor              | zip of a number    | zip of a tensor ...
              data.pkl  data/0: values ...

No code of a pickle runs: all is loaded with ``weights_only=True``. The values of a tensor are bytes in one place, which
a rank reads in part, as of any other file.
"""

import io
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from zipfile import ZipFile

import torch

from nxdpp.checkpoint.files import pieces
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import FileSpan, bytes_of, printable, read_bytes
from nxdpp.ground.torch_names import FAKE_MODE, FILE_OFFSET

_VALUES = "data/0"
"""Name of a tensor's values in its zip."""
_LENGTHS_AT, _LENGTHS = 26, struct.Struct("<HH")
"""Place of two lengths in the header of a record of a zip."""


class SavedSpan(NamedTuple):
    """Bytes of a file that ``torch.save`` wrote for one value."""

    file: str
    start: int
    length: int

    def load(self, folder: Path, what: str, with_values: bool = True) -> Any:
        """Return the value; a tensor is on the CPU, and without memory unless ``with_values``.

        Raises ``DamagedFile``, with ``what`` for the value, and ``OSError`` for a file that cannot be read.
        """
        path = folder / self.file
        with path.open("rb") as file, nullcontext() if with_values else FAKE_MODE():
            window = _Window(file.fileno(), self.start, self.length)
            try:
                return torch.load(cast(IO[bytes], window), "cpu", weights_only=True)
            except OSError:
                raise
            except Exception as error:
                # The content is arbitrary bytes, and torch and pickle raise many types for it.
                raise DamagedFile(
                    f"{self.named(folder, what)} is damaged, or not a tensor ({type(error).__name__}: "
                    f"{first_line(error)})."
                ) from error

    def named(self, folder: Path, what: str) -> str:
        """Text of the place for messages."""
        return f"the piece of {printable(what, 300)} at byte {self.start} of {folder / self.file}"

    def tensor(
        self, folder: Path, what: str, shape: Sequence[int], dtype: torch.dtype, with_values: bool = True
    ) -> torch.Tensor:
        """Return the dense tensor of ``shape`` and ``dtype`` that the file must have here; raises as ``load``."""
        found = self.load(folder, what, with_values)
        if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
            raise DamagedFile(f"{self.named(folder, what)} is no dense tensor.")
        if (tuple(found.shape), found.dtype) != (tuple(shape), dtype):
            raise DamagedFile(
                f"{self.named(folder, what)} is of {found.dtype} and shape {list(found.shape)}, and by .metadata of "
                f"{dtype} and {list(shape)}: the files are of different saves."
            )
        return found.detach()

    def values(self, folder: Path, what: str, shape: Sequence[int], dtype: torch.dtype) -> FileSpan:
        """Return the place of a tensor's values, without checksums; raises as ``tensor``."""
        found = self.tensor(folder, what, shape, dtype, with_values=False)
        if not found.is_contiguous():
            raise DamagedFile(
                f"{self.named(folder, what)} is no contiguous tensor: python -m nxdpp checkpoint convert reads it."
            )
        first: Any = getattr(found.untyped_storage(), FILE_OFFSET.name, self.length)
        first += found.storage_offset() * found.itemsize
        if first + found.nbytes > self.length:
            raise DamagedFile(f"{self.named(folder, what)} does not have its values in one place.")
        return FileSpan(self.file, self.start + first, found.nbytes, ())


def write_saved(path: Path, values: Iterable[tuple[str, Any]]) -> dict[str, tuple[SavedSpan, FileSpan | None]]:
    """Write ``values`` by name to the new file ``path``, and return the places of each and of a tensor's elements.

    One tensor is copied at a time, to the CPU. The file is on the disk when this returns. Raises ``OSError``.
    """
    places: dict[str, tuple[SavedSpan, tuple[int, ...] | None]] = {}
    with path.open("xb") as file:
        for name, given in values:
            value, checksums, start = given, None, file.tell()
            if isinstance(given, torch.Tensor):
                value = given.detach().cpu().contiguous()
                if value.untyped_storage().nbytes() != value.nbytes:
                    # torch would write all memory of a view.
                    value = value.clone()
                checksums = _checksums(value)
            torch.save(value, file)
            places[name] = SavedSpan(path.name, start, file.tell() - start), checksums
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        return {
            name: (span, None if checksums is None else _elements(file.fileno(), span, checksums))
            for name, (span, checksums) in places.items()
        }


def _checksums(value: torch.Tensor) -> tuple[int, ...]:
    memory = bytes_of(value)
    size = pieces.PIECE_BYTES
    return tuple(zlib.crc32(memory[start : start + size]) for start in range(0, len(memory), size))


def _elements(descriptor: int, span: SavedSpan, checksums: tuple[int, ...]) -> FileSpan:
    window = cast(IO[bytes], _Window(descriptor, span.start, span.length))
    with ZipFile(window) as zipped:
        record = next(each for each in zipped.infolist() if each.filename.endswith(f"/{_VALUES}"))
    # The lengths of the name and the padding before a record end its header in the file.
    window.seek(record.header_offset + _LENGTHS_AT)
    name, padding = _LENGTHS.unpack(window.read(_LENGTHS.size))
    return FileSpan(span.file, span.start + window.tell() + name + padding, record.file_size, checksums)


def first_line(error: Exception) -> str:
    """The first line of the text of ``error``."""
    return printable(str(error).strip().split("\n")[0], 300)


class _Window(io.RawIOBase):
    """Bytes ``start`` to ``start + length`` of an open file, as a file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        """Return ``True``."""
        return True

    def seekable(self) -> bool:
        """Return ``True``."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the place of the next read, and return it."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, into: Any) -> int:
        """Read bytes into memory, and return their number."""
        count = read_bytes(
            self._descriptor, self._start + self._at, memoryview(into)[: max(0, self._length - self._at)]
        )
        self._at += count
        return count
