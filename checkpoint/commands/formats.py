"""The format of the files in a directory."""

from pathlib import Path
from typing import Literal

from nxdpp.checkpoint.commands.opened import is_checkpoint, missing
from nxdpp.checkpoint.commands.rank_paths import rank_files
from nxdpp.checkpoint.huggingface.read_directory import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, WEIGHTS_FIELD, settings_of
from nxdpp.checkpoint.huggingface.replace_adapter import adapter_weights

Format = Literal["nxdpp", "nxd", "huggingface"]


def format_of(path: Path) -> Format:
    """Return the format of ``path``.

    Raises ``ValueError`` for a path without a checkpoint and for missing ranks, and ``DamagedFile`` for an unfinished
    checkpoint.
    """
    if is_checkpoint(path):
        return "nxdpp"
    if rank_files(path):
        return "nxd"
    if is_huggingface(path):
        return "huggingface"
    raise missing(path)


def is_huggingface(path: Path) -> bool:
    """Return whether ``path`` has weights of a Hugging Face directory, or an adapter."""
    if not path.is_dir():
        return False
    weights = any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)) or any(path.glob("*.bin"))
    named = (path / CONFIG_FILE).is_file() and WEIGHTS_FIELD in settings_of(path)
    return weights or named or adapter_weights(path) is not None
