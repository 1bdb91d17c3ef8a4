"""Which tensors a Hugging Face directory has, and in which files."""

import json
from pathlib import Path

from nxdpp.checkpoint.files.safetensors_reader import Mapping, StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of ``directory`` by their names there, from the headers of its files.

    Like ``from_pretrained``, takes ``model.safetensors`` where it is there, and the shards of
    ``model.safetensors.index.json`` otherwise. Raises ``ValueError`` for a directory that has neither, that lacks a
    file or a tensor that its index names, whose files are damaged, or whose weights are quantized.
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory. Give one that save_pretrained wrote; download a model of the Hugging "
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
            f"{directory / pickled[0]} is pickled, which is not read, and there is no {SINGLE_FILE} or {INDEX_FILE} "
            f"beside it. Write them once with transformers: CLASS.from_pretrained({str(directory)!r})"
            f".save_pretrained(DIRECTORY)."
        )
    found = ", ".join(sorted(path.name for path in directory.iterdir())[:10]) or "nothing"
    raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}, but {found}: give another directory.")


def _tensors_of_shards(index: Path) -> dict[str, StoredTensor]:
    files = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    mapping = Mapping()
    # In this order the last one wins where two files have a tensor, as in from_pretrained.
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise ValueError(f"{index} names {name}, which is not a file beside it. Download the checkpoint again.")
        path = index.parent / name
        if not path.is_file():
            raise ValueError(f"{index} names {name}, which is not there. Copy or download the missing file.")
        found = read_header(path, mapping)
        absent = [tensor for tensor, file in files.items() if file == name and tensor not in found]
        if absent:
            raise ValueError(
                f"{path} lacks {len(absent)} tensors that {index.name} says it has, the first of them {absent[0]}. "
                f"The two are not of one checkpoint: copy or download both again."
            )
        tensors |= found
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is corrupt ({type(error).__name__}: {error}). Copy or download it again.") from error
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} is corrupt: its weight_map does not give files by tensors. Download it again.")
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
            f"{config} says that the weights are quantized (quantization_config), and quantized weights are not "
            f"loaded. Give a checkpoint that is not quantized."
        )
