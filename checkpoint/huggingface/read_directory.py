"""Tensors of a Hugging Face directory, found in the headers of its files."""

import json
from pathlib import Path

from nxdpp.checkpoint.files.safetensors_reader import Mapping, StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of ``directory`` by their stored names.

    Like ``from_pretrained``, reads ``model.safetensors``, or else the files of ``model.safetensors.index.json``.
    Raises ``ValueError`` for missing files or tensors, for damaged files and for quantized weights.
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory. Give one that save_pretrained wrote. Download a model of the Hugging "
            f"Face hub first, with huggingface_hub.snapshot_download."
        )
    _check_not_quantized(directory / CONFIG_FILE)
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE, Mapping())
    if (directory / INDEX_FILE).is_file():
        return _tensors_of_shards(directory / INDEX_FILE)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ValueError(
            f"{directory / pickled[0]} is pickled, which is not read, and {directory} has no {SINGLE_FILE} or "
            f"{INDEX_FILE}. Convert it once with transformers: CLASS.from_pretrained({str(directory)!r})"
            f".save_pretrained(DIRECTORY)."
        )
    found = ", ".join(sorted(path.name for path in directory.iterdir())[:10]) or "nothing"
    raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}, but {found}: give another directory.")


def _tensors_of_shards(index: Path) -> dict[str, StoredTensor]:
    files = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    mapping = Mapping()
    # If two files have a tensor, the last one in this order counts, as in from_pretrained.
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise ValueError(f"{index} names {name}, which is not a file beside it. Download the checkpoint again.")
        path = index.parent / name
        if not path.is_file():
            raise ValueError(f"{index} names {name}, which does not exist. Copy or download the missing file.")
        found = read_header(path, mapping)
        absent = [tensor for tensor, file in files.items() if file == name and tensor not in found]
        if absent:
            raise ValueError(
                f"{path} lacks {len(absent)} tensors that {index.name} lists, the first of them {absent[0]}. "
                f"They are not from one checkpoint: copy or download both again."
            )
        tensors |= found
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is corrupt ({type(error).__name__}: {error}). Copy or download it again.") from error
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} is corrupt: its weight_map does not map tensors to files. Download it again.")
    return files


def _check_not_quantized(config: Path) -> None:
    if not config.is_file():
        return
    try:
        settings = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is corrupt ({error}). Copy or download it again.") from error
    if isinstance(settings, dict) and settings.get("quantization_config"):
        raise ValueError(
            f"{config} says that the weights are quantized (quantization_config). Quantized weights cannot be loaded: "
            f"give a checkpoint that is not quantized."
        )
