"""``python -m nxdpp checkpoint convert``: write the model of a checkpoint in a different format."""

from dataclasses import dataclass
from pathlib import Path

from nxdpp.checkpoint.commands.formats import Format, format_of
from nxdpp.checkpoint.commands.huggingface import huggingface_source, write_huggingface
from nxdpp.checkpoint.commands.rank_directory import rank_source, write_ranks
from nxdpp.checkpoint.commands.sharded import sharded_source, write_sharded
from nxdpp.checkpoint.commands.source import Source
from nxdpp.checkpoint.huggingface.write_directory import SHARD_BYTES
from nxdpp.tensor.rank_files import local_path


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion that is asked for.

    Attributes:
        path: the source.
        destination: a directory without a checkpoint.
        to: its format.
        config: replaces the configuration of the source.
        tensor: number of tensor ranks, for the format ``nxd``.
        pipeline: number of pipeline ranks, for the format ``nxd``.
        blocks: fused weights of ranks are divided as ``tensor_parallelize`` divides them.
        plain: the model is not of transformers; its tensors keep their names.
        largest: bytes of a file, for the format ``huggingface``; ``None`` for 1 GB.
    """

    path: Path
    destination: Path
    to: Format
    config: Path | None = None
    tensor: int = 1
    pipeline: int = 1
    blocks: bool = False
    plain: bool = False
    largest: int | None = None


def convert(asked: ConversionRequest) -> None:
    """Write the model of a source in a different format.

    Raises ``ValueError`` for a source that is no checkpoint or has the format already, for a destination that has
    a checkpoint or is not on a file system, and for options that do not fit the formats.
    """
    if not asked.path.is_dir():
        raise ValueError(f"{asked.path} is not a directory: give a checkpoint, or a Hugging Face directory.")
    local_path(asked.destination)
    kind = format_of(asked.path)
    if kind == asked.to:
        raise ValueError(f"{asked.path} has the format {asked.to} already.")
    _check_options(asked, kind)
    source = _source(asked, kind)
    if asked.to == "nxdpp":
        write_sharded(source, asked.destination)
    elif asked.to == "nxd":
        write_ranks(source, asked.destination, asked.tensor, asked.pipeline, asked.blocks)
    else:
        write_huggingface(source, asked.destination, asked.largest or SHARD_BYTES)
    count = sum(layout.bytes for layout in source.layouts.values())
    print(f"{asked.destination}: {len(source.layouts):,} tensors of {asked.path}, {count:,} bytes, as {asked.to}.")


def _check_options(asked: ConversionRequest, kind: Format) -> None:
    """Raise ``ValueError`` for an option that would have no effect."""
    if asked.to != "nxd" and (asked.tensor, asked.pipeline) != (1, 1):
        raise ValueError(
            f"numbers of ranks are for --to nxd, and {asked.to} is the same for all of them: leave them out."
        )
    if asked.blocks and "nxd" not in (asked.to, kind):
        raise ValueError("--blocks is for files of ranks, and neither format has them: leave it out.")
    if asked.largest is not None and asked.to != "huggingface":
        raise ValueError("--max-shard-size is for --to huggingface: leave it out.")
    if asked.plain and asked.config is not None:
        raise ValueError("--plain is for a module without a configuration: leave it or --config out.")
    if asked.plain and "nxd" in (asked.to, kind):
        raise ValueError("files of ranks need the configuration of a transformers model: give --config, not --plain.")


def _source(asked: ConversionRequest, kind: Format) -> Source:
    if kind == "nxd":
        return rank_source(asked.path, asked.config, asked.blocks)
    return (sharded_source if kind == "nxdpp" else huggingface_source)(asked.path, asked.config, asked.plain)
