"""``python -m nxdpp checkpoint convert``: write the model of a checkpoint in a different format.

Here are the dispatch, and a checkpoint of nxdpp as source and as destination.
"""

import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex

from nxdpp.checkpoint.commands.dcp import dcp_source, write_dcp
from nxdpp.checkpoint.commands.formats import Format, format_of, opened
from nxdpp.checkpoint.commands.huggingface import huggingface_source, write_huggingface
from nxdpp.checkpoint.commands.rank_directory import rank_source, write_ranks
from nxdpp.checkpoint.commands.source import Source, SourceOptimizer, check_free, meta_model, plain_model, with_dtypes
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import OF_MODEL, OF_OPTIMIZER, write_document
from nxdpp.checkpoint.distributed.reads import read_tensors
from nxdpp.checkpoint.distributed.rectangles import whole
from nxdpp.checkpoint.files.checksummed_writer import write_streamed
from nxdpp.checkpoint.huggingface.write_directory import SHARD_BYTES
from nxdpp.counted import counted
from nxdpp.tensor.rank_files import local_path


def convert(
    path: Path,
    destination: Path,
    to: Format,
    *,
    config: Path | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    blocks: bool = False,
    plain: bool = False,
    largest: int | None = None,
    optimizer: bool = False,
) -> None:
    """Write the model of ``path`` in a different format.

    Args:
        path: the source.
        destination: a directory without a checkpoint.
        to: its format.
        config: replaces the configuration of the source.
        tensor: number of tensor ranks, for the format ``nxd``.
        pipeline: number of pipeline ranks, for the format ``nxd``.
        blocks: fused weights of ranks are divided as ``tensor_parallelize`` divides them.
        plain: the model is not of transformers; its tensors keep their names.
        largest: bytes of a file, for the format ``huggingface``; ``None`` for 1 GB.
        optimizer: write the optimizer's state too, between the formats ``nxdpp`` and ``dcp``.

    Raises ``ValueError`` for a source that is no checkpoint or has the format already, for a destination that has
    a checkpoint or is not on a file system, and for options that do not fit the formats.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: give a checkpoint, or a Hugging Face directory.")
    local_path(destination)
    kind = format_of(path)
    if kind == to:
        raise ValueError(f"{path} has the format {to} already.")
    # Options without an effect.
    if to != "nxd" and (tensor, pipeline) != (1, 1):
        raise ValueError(f"numbers of ranks are for --to nxd, and {to} is the same for all of them: leave them out.")
    if blocks and "nxd" not in (to, kind):
        raise ValueError("--blocks is for files of ranks, and neither format has them: leave it out.")
    if largest is not None and to != "huggingface":
        raise ValueError("--max-shard-size is for --to huggingface: leave it out.")
    if plain and config is not None:
        raise ValueError("--plain is for a module without a configuration: leave it or --config out.")
    if plain and "nxd" in (to, kind):
        raise ValueError("files of ranks need the configuration of a transformers model: give --config, not --plain.")
    if optimizer and {kind, to} != {"nxdpp", "dcp"}:
        raise ValueError(f"--with-optimizer is for nxdpp to dcp, or back, and not for {kind} to {to}: leave it out.")
    if kind == "nxd":
        source = rank_source(path, config, blocks)
    elif kind == "huggingface":
        source = huggingface_source(path, config, plain)
    else:
        source = (dcp_source if kind == "dcp" else sharded_source)(path, config, plain, optimizer)
    if optimizer and source.optimizer is None:
        raise ValueError(f"{path} has no optimizer: leave out --with-optimizer.")
    if to == "nxdpp":
        write_sharded(source, destination)
    elif to == "nxd":
        write_ranks(source, destination, tensor, pipeline, blocks)
    elif to == "dcp":
        write_dcp(source, destination)
    else:
        write_huggingface(source, destination, largest or SHARD_BYTES)
    count = sum(layout.bytes for layout in source.layouts.values())
    print(f"{destination}: {counted(len(source.layouts), 'tensor')} of {path}, {count:,} bytes, as {to}.")


def sharded_source(path: Path, config: Path | None, plain: bool = False, optimizer: bool = False) -> Source:
    """Return the model of the checkpoint ``path``, as ``plain`` tensors by their own names or of its configuration.

    With ``optimizer`` its state is there too, if the checkpoint has one.

    Raises ``ValueError`` for a checkpoint without a model, and where its tensors do not fit the configuration.
    """
    folder, document = opened(path)
    content, metadata = document.content, document.metadata
    if content["ties"] is None:
        raise ValueError(f"{folder} has no model to convert.")
    saved = document.layouts(OF_MODEL)
    if plain:
        model = plain_model(saved, content["ties"], folder)
    else:
        model = meta_model(content.get("configuration"), config, folder)
    sources = model.sources({name: each.shape for name, each in saved.items()}, content["ties"], folder)
    layouts = {name: saved[source] for name, source in sources.items()}
    with_dtypes(model, layouts)
    every = document.layouts()

    def read(name: str) -> torch.Tensor:
        values = torch.empty(every[name].shape, dtype=every[name].dtype, device="cpu")
        read_tensors(folder, metadata, {name: whole(values)})
        return values

    state = None
    if optimizer and content["optimizer"] is not None:
        of_optimizer = {name: each for name, each in every.items() if name.startswith(OF_OPTIMIZER)}
        state = SourceOptimizer(content["optimizer"], of_optimizer, read)
    return Source(model, layouts, lambda name: read(f"{OF_MODEL}{sources[name]}"), state)


def write_sharded(source: Source, destination: Path) -> None:
    """Write a checkpoint of ``source``, which ``load_checkpoint`` reads in any layout of ranks.

    Raises ``ValueError`` where there is one already, and ``OSError`` if it cannot be written.
    """
    check_free(destination, DOCUMENT)
    if not destination.name:
        raise ValueError(f"{destination} has no name, which is the tag of the checkpoint: give its absolute path.")
    destination.mkdir(parents=True, exist_ok=True)
    save = secrets.token_hex(4)
    file = destination / directory.file_name(save, 0)
    document = directory.new_document(destination, save)
    layouts = {f"{OF_MODEL}{name}": each for name, each in source.layouts.items()}
    values: Iterator[tuple[str, torch.Tensor]] = ((f"{OF_MODEL}{name}", source.read(name)) for name in source.layouts)
    if source.optimizer is not None:
        read = source.optimizer.read
        layouts |= source.optimizer.layouts
        values = itertools.chain(values, ((name, read(name)) for name in source.optimizer.layouts))
    try:
        spans = write_streamed(file, layouts, values)
        tensors = {name: whole(each.on_meta()) for name, each in layouts.items()}
        _, metadata = create_default_global_save_plan([create_default_local_save_plan(tensors, True)])
        places = {MetadataIndex(name, torch.Size([0] * len(layouts[name].shape))): span for name, span in spans.items()}
        number = directory.next_number(destination.parent)
        write_document(document, number, _content(source), metadata, places)
    except BaseException:
        file.unlink(missing_ok=True)
        document.unlink(missing_ok=True)
        raise
    directory.put_document(destination, save)
    directory.flush_directory(destination)


def _content(source: Source) -> dict[str, Any]:
    return {
        **dict.fromkeys(("layout", "scheduler", "grad_scaler", "user_content")),
        "optimizer": None if source.optimizer is None else source.optimizer.content,
        "ties": source.model.tensors.ties,
        "configuration": source.model.texts or None,
        "random": [],
    }
