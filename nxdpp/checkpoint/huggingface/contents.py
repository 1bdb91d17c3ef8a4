"""Contents of a Hugging Face directory apart from values: its small files and the headers of its weights.

One rank of a host reads them and sends them to the others. A read error travels with them: each rank raises it where
it needs the contents.
"""

import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.files.safetensors_reader import OpenFile, StoredTensor, read_header
from nxdpp.checkpoint.huggingface.read_directory import settings_of, stored_tensors
from nxdpp.checkpoint.huggingface.replace_adapter import adapter_weights


@dataclass(frozen=True)
class Contents:
    """Contents of ``directory``.

    Attributes:
        directory: the directory.
        adapter: the file of an adapter's weights, which may be missing; ``None`` for a whole model.
        digest: of all tensors and of the names and sizes of their files; equal for copies on several hosts.
    """

    directory: Path
    adapter: Path | None
    digest: int
    _settings: dict[str, Any] | Exception
    _tensors: dict[str, StoredTensor] | Exception

    @property
    def settings(self) -> dict[str, Any]:
        """The content of ``config.json``. Raises ``ValueError`` for a damaged file, and ``OSError``."""
        if isinstance(self._settings, Exception):
            raise self._settings
        return self._settings

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by their stored names. Raises the ``ValueError`` and ``OSError`` of ``stored_tensors``."""
        if isinstance(self._tensors, Exception):
            raise self._tensors
        return self._tensors

    @property
    def lacks_weights(self) -> bool:
        """``True`` for an adapter without a file of weights."""
        return isinstance(self._tensors, FileNotFoundError)

    def packed(self) -> bytes:
        """The contents as bytes for ``unpacked``."""
        tensors: Any = self._tensors
        if not isinstance(tensors, Exception):
            files = {each.path: each.stamp for each in tensors.values()}
            tensors = (
                files,
                [(name, each.shape, each.dtype, each.path, each.place) for name, each in tensors.items()],
            )
        return zlib.compress(pickle.dumps((self.directory, self.adapter, self.digest, self._settings, tensors)), 1)


def read_contents(directory: Path) -> Contents:
    """Read the contents of ``directory``. Errors are raised later, see ``Contents``."""
    adapter = adapter_weights(directory)
    settings: dict[str, Any] | Exception
    tensors: dict[str, StoredTensor] | Exception
    try:
        settings = settings_of(directory)
    except (ValueError, OSError) as error:
        settings = error
    try:
        tensors = stored_tensors(directory) if adapter is None else read_header(adapter, OpenFile())
    except (ValueError, OSError) as error:
        tensors = error
    return Contents(directory, adapter, _digest(directory, tensors), settings, tensors)


def unpacked(packed: bytes) -> Contents:
    """Return the contents that another rank of this host has ``packed``."""
    directory, adapter, digest, settings, tensors = pickle.loads(zlib.decompress(packed))
    if not isinstance(tensors, Exception):
        files, entries = tensors
        opened = OpenFile()
        tensors = {
            name: StoredTensor(shape, dtype, path, files[path], opened, name, place)
            for name, shape, dtype, path, place in entries
        }
    return Contents(directory, adapter, digest, settings, tensors)


def _digest(directory: Path, tensors: dict[str, StoredTensor] | Exception) -> int:
    if isinstance(tensors, Exception):
        return 0
    described = [
        (name, each.path.name, each.stamp[1], each.shape, str(each.dtype), each.place)
        for name, each in sorted(tensors.items())
    ]
    return zlib.crc32(repr((str(directory), described)).encode())
