"""``python -m nxdpp checkpoint convert``: the model of a checkpoint in another format."""

from math import prod
from pathlib import Path

from nxdpp.checkpoint.commands.huggingface import huggingface_source, write_huggingface
from nxdpp.checkpoint.commands.opened import is_checkpoint
from nxdpp.checkpoint.commands.sharded import sharded_source, write_sharded


def convert(path: Path, destination: Path, to: str, config: Path | None) -> None:
    """Write the model of ``path`` to ``destination`` in the format ``to``; ``config`` replaces its configuration.

    Raises ``ValueError`` for a source that is no checkpoint or has the format already, and for a destination that has
    a checkpoint.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: give a checkpoint, or a Hugging Face directory.")
    kind = "nxdpp" if is_checkpoint(path) else "huggingface"
    if kind == to:
        raise ValueError(f"{path} has the format {to} already.")
    source = sharded_source(path, config) if kind == "nxdpp" else huggingface_source(path, config)
    if to == "nxdpp":
        write_sharded(source, destination)
    else:
        write_huggingface(source, destination)
    count = sum(dtype.itemsize * prod(shape) for dtype, shape in source.described.values())
    print(f"{destination}: {len(source.described):,} tensors of {path}, {count:,} bytes, as {to}.")
