"""Tensors of a checkpoint to convert, whole, by the names of the model, read one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from nxdpp.checkpoint.commands.meta_model import MetaModel
from nxdpp.checkpoint.files.layout import Layout


class Source(NamedTuple):
    """A model to convert.

    Attributes:
        model: on the meta device.
        layouts: shape and dtype of each tensor, by the names of ``model.tensors``.
        read: returns the values of one.
    """

    model: MetaModel
    layouts: dict[str, Layout]
    read: Callable[[str], torch.Tensor]


def check_free(destination: Path, *names: str) -> None:
    """Raise ``ValueError`` where ``destination`` has one of the files or directories ``names``."""
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{destination} is a file: give a directory.")
    found = [name for name in names if (destination / name).exists()]
    if found:
        raise ValueError(f"{destination} has {', '.join(found)} already: give another directory.")
