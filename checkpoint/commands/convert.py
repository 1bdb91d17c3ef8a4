"""``python -m nxdpp checkpoint convert``: the model of a checkpoint in another format."""

from pathlib import Path

from nxdpp.checkpoint.commands.huggingface import huggingface_source, write_huggingface
from nxdpp.checkpoint.commands.opened import is_checkpoint
from nxdpp.checkpoint.commands.rank_directory import rank_files, rank_source, write_ranks
from nxdpp.checkpoint.commands.sharded import sharded_source, write_sharded


def convert(path: Path, destination: Path, to: str, config: Path | None, tensor: int, pipeline: int) -> None:
    """Write the model of ``path`` to ``destination`` in the format ``to``; ``config`` replaces its configuration.

    ``tensor`` and ``pipeline`` are numbers of ranks, for the format ``nxd``.

    Raises ``ValueError`` for a source that is no checkpoint or has the format already, and for a destination that has
    a checkpoint.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: give a checkpoint, or a Hugging Face directory.")
    if to != "nxd" and (tensor, pipeline) != (1, 1):
        raise ValueError(f"numbers of ranks are for --to nxd, and {to} is the same for all of them: leave them out.")
    kind = "nxdpp" if is_checkpoint(path) else "nxd" if rank_files(path) else "huggingface"
    if kind == to:
        raise ValueError(f"{path} has the format {to} already.")
    source = _SOURCES[kind](path, config)
    if to == "nxdpp":
        write_sharded(source, destination)
    elif to == "nxd":
        write_ranks(source, destination, tensor, pipeline)
    else:
        write_huggingface(source, destination)
    count = sum(layout.bytes for layout in source.layouts.values())
    print(f"{destination}: {len(source.layouts):,} tensors of {path}, {count:,} bytes, as {to}.")


_SOURCES = {"nxdpp": sharded_source, "nxd": rank_source, "huggingface": huggingface_source}
