"""The format of the files in a directory."""

from pathlib import Path
from typing import Literal

from nxdpp.checkpoint.commands.opened import is_checkpoint
from nxdpp.checkpoint.commands.rank_paths import rank_files
from nxdpp.checkpoint.huggingface.read_directory import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, WEIGHTS_FIELD, settings_of
from nxdpp.checkpoint.huggingface.replace_adapter import adapter_weights

Format = Literal["nxdpp", "nxd", "huggingface"]


def format_of(path: Path) -> Format:
    """Return the format of ``path``; ``nxdpp`` where it has none. Raises ``ValueError`` for missing ranks."""
    if is_checkpoint(path):
        return "nxdpp"
    if rank_files(path):
        return "nxd"
    return "huggingface" if is_huggingface(path) else "nxdpp"


def is_huggingface(path: Path) -> bool:
    """Return whether ``path`` has weights of a Hugging Face directory, or an adapter."""
    weights = any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    named = (path / CONFIG_FILE).is_file() and WEIGHTS_FIELD in settings_of(path)
    return weights or named or (path.is_dir() and adapter_weights(path) is not None)
