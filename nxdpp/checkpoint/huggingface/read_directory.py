"""Contents of a Hugging Face directory apart from values: its small files and the headers of its weights.

One rank of a host reads them and sends them to the others. A read error travels with them: each rank raises it where
it needs the contents.

::

    host a   rank 0   reads the headers ──▶ ranks 1, 2, 3
    host b   rank 4   reads the headers ──▶ ranks 5, 6, 7
"""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nxdpp.checkpoint.files.pieces import printable
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, StoredTensor, read_header
from nxdpp.counted import counted
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.wire_form import packed, unpacked

T = TypeVar("T")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
WEIGHTS_FIELD = "transformers_weights"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
UNFINISHED = ".unfinished"
COMPLETE = "complete"
"""Folder in ``UNFINISHED`` of a new adapter that gets its place."""
_QUANTISATIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Contents:
    """Contents of ``directory``; ``adapter`` is the file of an adapter, which may be missing, else ``None``."""

    directory: Path
    adapter: Path | None
    _settings: dict[str, Any] | Exception
    _tensors: dict[str, StoredTensor] | Exception

    @property
    def settings(self) -> dict[str, Any]:
        """The content of ``config.json``. Raises ``ValueError`` for a damaged file, and ``OSError``."""
        return _value(self._settings)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by their stored names. Raises the ``ValueError`` and ``OSError`` of ``stored_tensors``."""
        return _value(self._tensors)

    @property
    def lacks_weights(self) -> bool:
        """``True`` for an adapter without a file of weights."""
        return isinstance(self._tensors, FileNotFoundError)

    @property
    def digest(self) -> int:
        """Of all tensors and of the names and sizes of their files; equal for copies on several hosts."""
        if isinstance(self._tensors, Exception):
            return 0
        described = [
            (name, each.path.name, each.stamp[1], each.shape, str(each.dtype), each.place)
            for name, each in sorted(self._tensors.items())
        ]
        return zlib.crc32(repr((str(self.directory), described)).encode())


def read_contents(directory: Path) -> Contents:
    """Read the contents of ``directory``. Errors are raised later, see ``Contents``."""
    adapter = adapter_weights(directory)
    tensors = _tried(lambda: stored_tensors(directory) if adapter is None else read_header(adapter, OpenFile()))
    return Contents(directory, adapter, _tried(lambda: settings_of(directory)), tensors)


def _tried(read: Callable[[], T]) -> T | Exception:
    try:
        return read()
    except (ValueError, OSError) as error:
        return error


def _value(read: T | Exception) -> T:
    if isinstance(read, Exception):
        raise read
    return read


def contents_of(directory: Path, exchange: Exchange) -> Contents:
    """Return the contents of ``directory``, which one rank of each host reads; collective over all ranks.

    Ranks are of one host if they see the directory as the same one: not in containers with other file systems.
    """
    if exchange.ranks == 1:
        return read_contents(directory)
    views = exchange.gather(_view(directory))
    leaders = [views.index(view) for view in views]
    read = read_contents(directory) if leaders[exchange.rank] == exchange.rank else None
    sent = None if read is None else zlib.compress(packed(_described(read)), 1)
    received = exchange.through_first(sent, lambda of_ranks: [of_ranks[leader] for leader in leaders])
    return _of_description(*unpacked(zlib.decompress(received))) if read is None else read


def _described(read: Contents) -> tuple[Any, ...]:
    """Describe the contents for another rank of this host, with each file named once."""
    found = read._tensors
    if isinstance(found, Exception):
        return read.directory, read.adapter, read._settings, found, {}
    tensors = [(name, each.shape, each.dtype, each.path, each.place) for name, each in found.items()]
    return read.directory, read.adapter, read._settings, tensors, {each.path: each.stamp for each in found.values()}


def _of_description(
    directory: Path, adapter: Path | None, settings: Any, tensors: Any, stamps: dict[Path, tuple[int, int, int]]
) -> Contents:
    if not isinstance(tensors, Exception):
        file = OpenFile()
        tensors = {
            name: StoredTensor(shape, dtype, path, stamps[path], file, name, place)
            for name, shape, dtype, path, place in tensors
        }
    return Contents(directory, adapter, settings, tensors)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of ``directory`` by their stored names.

    Like ``from_pretrained``, reads the file that ``config.json`` names (``transformers_weights``), else
    ``model.safetensors``, else the files of ``model.safetensors.index.json``.
    Raises ``ValueError`` for missing files or tensors and for damaged files.
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory. Give one that save_pretrained wrote. Download a model of the Hugging "
            f"Face hub first, with huggingface_hub.snapshot_download."
        )
    named = settings_of(directory).get(WEIGHTS_FIELD)
    if named is not None:
        return _tensors_of_named(directory, str(named))
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE, OpenFile())
    if (directory / INDEX_FILE).is_file():
        return _tensors_of_shards(directory / INDEX_FILE)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ValueError(
            f"{directory / pickled[0]} is pickled, which is not read, and {directory} has no {SINGLE_FILE} or "
            f"{INDEX_FILE}. Convert it once with transformers: CLASS.from_pretrained({str(directory)!r})"
            f".save_pretrained(DIRECTORY)."
        )
    found = ", ".join(printable(name) for name in sorted(path.name for path in directory.iterdir())[:10]) or "nothing"
    raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}, but {found}: give another directory.")


def settings_of(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``; empty without such a file. Raises ``ValueError`` for a damaged one."""
    config = directory / CONFIG_FILE
    settings = _read_json(config) if config.is_file() else None
    return settings if isinstance(settings, dict) else {}


def quantisation_of(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The quantisation that the ``settings`` of a ``config.json`` name, also for the text part of a larger model."""
    parts = [part for part in (settings, settings.get("text_config")) if isinstance(part, dict)]
    found = next((part[field] for part in parts for field in _QUANTISATIONS if part.get(field)), None)
    return found if found is None or isinstance(found, dict) else {"quant_method": found}


def method_of(settings: dict[str, Any]) -> str | None:
    """The method of quantisation that the ``settings`` of a ``config.json`` name; ``None`` for plain weights."""
    quantisation = quantisation_of(settings)
    if quantisation is None:
        return None
    method = quantisation.get("quant_method")
    if method is None and (quantisation.get("load_in_8bit") or quantisation.get("load_in_4bit")):
        method = "bitsandbytes"
    return str(method)


def adapter_weights(directory: Path) -> Path | None:
    """The file of the adapter's weights in ``directory``, or after a killed save; ``None`` where no adapter is."""
    if (directory / ADAPTER_CONFIG).is_file():
        return directory / ADAPTER_FILE
    above = directory.parent / UNFINISHED / COMPLETE / directory.name
    for complete in (directory / UNFINISHED / COMPLETE, above):
        if (complete / ADAPTER_CONFIG).is_file():
            moved = not (complete / ADAPTER_FILE).is_file()
            return (directory if moved else complete) / ADAPTER_FILE
    return None


def texts_in(folder: Path) -> dict[str, str]:
    """The text of each file of a configuration in ``folder``, by name."""
    files = (folder / name for name in (CONFIG_FILE, "generation_config.json"))
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}


def _tensors_of_named(directory: Path, name: str) -> dict[str, StoredTensor]:
    if Path(name).name != name or not (directory / name).is_file():
        raise ValueError(
            f"{directory / CONFIG_FILE} names {printable(name)!r} as its weights ({WEIGHTS_FIELD}), which is not "
            f"a file beside it. Copy or download the missing file."
        )
    path = directory / name
    return _tensors_of_shards(path) if name.endswith(".json") else read_header(path, OpenFile())


def _tensors_of_shards(index: Path) -> dict[str, StoredTensor]:
    files = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    opened = OpenFile()
    # If two files have a tensor, the last one in this order counts, as in from_pretrained.
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise ValueError(
                f"{index} names {printable(name)}, which is not a file beside it. Download the checkpoint again."
            )
        path = index.parent / name
        if not path.is_file():
            raise ValueError(
                f"{index} names {printable(name)}, which does not exist. Copy or download the missing file."
            )
        found = read_header(path, opened)
        absent = [tensor for tensor, file in files.items() if file == name and tensor not in found]
        if absent:
            raise ValueError(
                f"{path} lacks {counted(len(absent), 'tensor')} of {index.name} ({printable(absent[0])} is the first). "
                f"They are not from one checkpoint: copy or download both again."
            )
        tensors |= found
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    content = _read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} is corrupt: its weight_map does not map tensors to files. Download it again.")
    return files


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    # Deeply nested lists exceed Python's recursion.
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is corrupt ({type(error).__name__}: {printable(error)}). Copy or download it again."
        ) from error


def _view(directory: Path) -> tuple[str, str, int, int]:
    """The host, the directory's path, and its identity there: zeros if it cannot be found."""
    try:
        status = os.stat(directory)
        identity = status.st_dev, status.st_ino
    except OSError:
        identity = 0, 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}", str(directory), *identity
