"""Tensors of a Hugging Face directory, found in the headers of its files."""

import json
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.files.layout import printable
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
WEIGHTS_FIELD = "transformers_weights"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
UNFINISHED = ".unfinished"


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
                f"{path} lacks {len(absent)} tensors that {index.name} lists, the first of them "
                f"{printable(absent[0])}. They are not from one checkpoint: copy or download both again."
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
