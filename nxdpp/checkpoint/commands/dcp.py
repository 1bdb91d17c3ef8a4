"""Directory of torch.distributed.checkpoint, as source and as destination of a conversion."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from nxdpp.checkpoint.commands.source import (
    MetaModel,
    Source,
    SourceOptimizer,
    check_free,
    meta_model,
    plain_model,
    with_dtypes,
)
from nxdpp.checkpoint.dcp.directory import DcpTensor, read_dcp_directory
from nxdpp.checkpoint.dcp.optimizer_entries import found_optimizer, optimizer_key, torch_state
from nxdpp.checkpoint.distributed.directory import METADATA, SUFFIX, flush_directory
from nxdpp.checkpoint.files.pieces import layouts_of, listed
from nxdpp.checkpoint.huggingface.model_tensors import tensors_of
from nxdpp.checkpoint.huggingface.read_directory import texts_in
from nxdpp.counted import counted

_SHOWN = 5


def dcp_source(path: Path, config: Path | None, plain: bool = False, optimizer: bool = False) -> Source:
    """Return the model in the directory ``path``: under a key ``model``, or in no key.

    The model is of the configuration in ``config`` or ``path``; a prefix that all its names have is dropped.
    ``plain`` tensors keep their names. With ``optimizer`` its state is there too, if ``path`` has one. What is left out
    is printed.

    Raises ``ValueError`` for a damaged directory, where the tensors do not fit the configuration, and for copies of a
    tied tensor that differ. Raises as ``found_optimizer``.
    """
    directory = read_dcp_directory(path)
    try:
        stored = directory.model(plain)
    except ValueError as error:
        raise ValueError(f"{path} cannot be converted: {error}") from error
    if plain:
        model = plain_model(layouts_of(stored), {}, path)
        sources = {name: name for name in model.tensors.tensors}
    else:
        model = meta_model(texts_in(path), config, path)
        stored = _without_prefix(stored, model)
        sources = _sources(stored, model, path)
    layouts = layouts_of({name: stored[source] for name, source in sources.items()})
    with_dtypes(model, layouts)
    found = found_optimizer(directory, stored) if optimizer else None
    known = {each.name for each in stored.values()}.union(() if found is None else found.entries)
    others = {*directory.others, *directory.tensors} - known
    if others:
        names = listed(sorted(others), _SHOWN)
        print(f"{path}: {counted(len(others), 'entry is', 'entries are')} not of the model, and are left out: {names}.")
    state = None
    if found is not None:
        state = SourceOptimizer(found.content, layouts_of(found.tensors), lambda name: found.tensors[name].read())
    return Source(model, layouts, lambda name: stored[sources[name]].read(), state)


def write_dcp(source: Source, destination: Path) -> None:
    """Write the state dict of one process, with a tied tensor under each of its names.

    It is flat, and with an optimizer under the keys ``model`` and ``optimizer``.

    Each tensor has a file: torch keeps the tensors of a file in memory until it is closed.

    Raises ``ValueError`` where ``destination`` has a checkpoint, and ``OSError`` if it cannot be written.
    """
    texts = source.model.texts
    if destination.is_dir() and any(destination.glob(f"*{SUFFIX}")):
        raise ValueError(f"{destination} has files {SUFFIX} already: give another directory.")
    check_free(destination, METADATA, *texts)
    destination.mkdir(parents=True, exist_ok=True)
    first = {name: source.model.tensors.ties.get(name, name) for name in tensors_of(source.model.module)}
    state: dict[str, Any] = {name: source.layouts[own].on_meta() for name, own in first.items()}
    reads = {name: partial(source.read, own) for name, own in first.items()}
    if source.optimizer is not None:
        content, layouts, read = source.optimizer
        reads = {f"model.{name}": each for name, each in reads.items()}
        reads |= {optimizer_key(name): partial(read, name) for name in layouts}
        of_optimizer = torch_state(content, list(state), lambda name: layouts[name].on_meta())
        state = {"model": state, "optimizer": of_optimizer}
    writer = FileSystemWriter(destination, single_file_per_rank=False)
    try:
        for name, text in texts.items():
            (destination / name).write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            # torch warns of a save without a process group, also where no_dist asks for it.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(state, storage_writer=writer, planner=_PlannerOfSource(reads), no_dist=True)
    except BaseException as error:
        for file in (*destination.glob(f"*{SUFFIX}"), *destination.glob(f"{METADATA}*")):
            file.unlink(missing_ok=True)
        for name in texts:
            (destination / name).unlink(missing_ok=True)
        if isinstance(error, CheckpointException):
            # torch wraps what a rank raises, and here is one rank.
            raise error.failures[0][0] from None
        raise
    flush_directory(destination)


class _PlannerOfSource(DefaultSavePlanner):
    """Planner of tensors on the meta device, each of which is read when it is written."""

    def __init__(self, reads: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self._reads = reads

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of a tensor, or any other object."""
        return self._reads[index.fqn]() if index.fqn in self._reads else super().lookup_object(index)


def _without_prefix(stored: Mapping[str, DcpTensor], model: MetaModel) -> dict[str, DcpTensor]:
    """The tensors of ``stored`` by names without the prefix that the first name of ``model`` has there."""
    first = next(iter(model.tensors.tensors))
    ends = [name for name in stored if name == first or name.endswith(f".{first}")]
    prefix = min(ends, key=len).removesuffix(first) if ends else ""
    return {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}


def _sources(stored: Mapping[str, DcpTensor], model: MetaModel, path: Path) -> dict[str, str]:
    """The name in ``stored`` of each tensor of ``model``; raises ``ValueError`` for copies that differ."""
    copies = {name for names in model.tied_names for name in names}
    chosen: dict[str, str] = {}
    for first, *others in model.tied_names:
        found = [name for name in (first, *others) if name in stored]
        if not found:
            continue
        chosen[first] = found[0]
        for name in found[1:]:
            if not stored[name].has_values_of(stored[found[0]]):
                raise ValueError(
                    f"{name} and {found[0]} differ in {path}, and are one tensor by the configuration: give that of "
                    f"the model that was saved, --config DIR."
                )
    shapes = {name: each.shape for name, each in stored.items() if name not in copies or name in chosen.values()}
    return model.sources(shapes, chosen, path)
