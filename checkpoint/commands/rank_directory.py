"""Files of NeuronX Distributed's ranks, as source and as destination of a conversion.

::

    path/tp_rank_01_pp_rank_00/checkpoint.pt       of parallel_layers.save; these are written
    path/dp_rank_00_tp_rank_01_pp_rank_00.pt       of its trainer, in path or path/model

Files do not tell how a tensor is divided. That follows from the whole shapes of the configuration's model.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nxdpp.checkpoint.commands.meta_model import meta_model
from nxdpp.checkpoint.commands.rank_parts import Part, check_not_ambiguous, parts_of
from nxdpp.checkpoint.commands.rank_whole import Whole
from nxdpp.checkpoint.commands.source import Source, check_free
from nxdpp.checkpoint.distributed.configuration import texts_in
from nxdpp.checkpoint.files.layout import Layout
from nxdpp.checkpoint.files.rank_file import RankFile, make_file
from nxdpp.parallel_layers.rank_files import rank_name

_KEY = "model"
_FILE = "checkpoint.pt"
_OF_TRAINER = re.compile(r"dp_rank_0+_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_OF_SAVE = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")

Paths = Mapping[tuple[int, int], Path]
"""The file of each tensor and pipeline rank."""
Files = Sequence[RankFile]
"""The files of the tensor ranks of one pipeline rank."""


def rank_files(path: Path) -> Paths:
    """Return the files of ranks in ``path``; empty if there are none.

    Raises ``ValueError`` for missing ranks, and for the format of torch_xla.
    """
    found: dict[tuple[int, int], Path] = {}
    for folder in (path, path / "model"):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.name.endswith(".tensors"):
                raise ValueError(f"{entry} is of torch_xla (save_xser=True): save the checkpoint without it.")
            if match := _OF_TRAINER.fullmatch(entry.name):
                found.setdefault((int(match[1]), int(match[2])), entry)
            elif (match := _OF_SAVE.fullmatch(entry.name)) and (entry / _FILE).is_file():
                found.setdefault((int(match[1]), int(match[2])), entry / _FILE)
    if found:
        tensor, pipeline = (max(place[at] for place in found) + 1 for at in (0, 1))
        missing = [rank_name(t, p) for t in range(tensor) for p in range(pipeline) if (t, p) not in found]
        if missing:
            raise ValueError(f"{path} lacks the files of {', '.join(missing[:5])}: copy those of all ranks.")
    return found


def rank_source(path: Path, config: Path | None) -> Source:
    """Return the model in the files of ranks in ``path``.

    Raises ``ValueError`` where the tensors are not those of the configuration, where several wholes could be meant, and
    for copies of a tensor that differ.
    """
    files = rank_files(path)
    model = meta_model(texts_in(path), config, path)
    tensor, pipeline = (max(place[at] for place in files) + 1 for at in (0, 1))
    check_not_ambiguous(parts_of(model, tensor, 1, path)[0], tensor)
    opened = {place: RankFile(file, _KEY) for place, file in files.items()}
    held: dict[str, list[Files]] = {}
    for stage in range(pipeline):
        for name in opened[0, stage].layouts:
            held.setdefault(name, []).append([opened[each, stage] for each in range(tensor)])
    wholes = {
        name: Whole(name, copies[0], tuple(model.tensors.tensors[first].shape))
        for name, copies in held.items()
        if (first := model.tensors.ties.get(name, name)) in model.tensors.tensors
    }
    chosen: dict[str, str] = {}
    for name in wholes:
        first = model.tensors.ties.get(name, name)
        of_name = wholes[chosen.setdefault(first, name)]
        for copy in held[name]:
            of_name.check_equal(name, copy)
    unknown = {name: copies[0][0].layouts[name].shape for name, copies in held.items() if name not in wholes}
    shapes = {name: wholes[name].layout.shape for name in chosen.values()}
    sources = model.sources({**unknown, **shapes}, chosen, path)
    layouts = {name: wholes[own].layout for name, own in sources.items()}
    return Source(model, layouts, lambda name: wholes[sources[name]].read())


def write_ranks(source: Source, destination: Path, tensor: int, pipeline: int) -> None:
    """Write a file for each of ``tensor`` x ``pipeline`` ranks, which ``parallel_layers.load`` reads.

    Raises ``ValueError`` where ``destination`` has files of ranks or is no directory, for a model that cannot be
    divided, and for parts that other programs divide in other ways.
    """
    check_free(destination)
    if rank_files(destination):
        raise ValueError(f"{destination} has files of ranks already: give another directory.")
    parts = parts_of(source.model, tensor, pipeline, destination)
    for of_stage in parts:
        check_not_ambiguous(of_stage, tensor)
    made: list[Path] = []
    try:
        for stage, of_stage in enumerate(parts):
            folders = [destination / rank_name(rank, stage) for rank in range(tensor)]
            made += [folder / f".{_FILE}" for folder in folders]
            _write_stage(source, of_stage, made[-tensor:])
    except BaseException:
        for file in made:
            file.unlink(missing_ok=True)
        raise
    for file in made:
        file.rename(file.with_name(_FILE))


def _write_stage(source: Source, parts: Mapping[str, Part], paths: Sequence[Path]) -> None:
    """Write the files of the tensor ranks of one pipeline rank; each tensor is read once."""
    first = source.model.tensors.ties
    layouts = {name: Layout(part.shape, source.layouts[first.get(name, name)].dtype) for name, part in parts.items()}
    files = [make_file(path, layouts, _KEY) for path in paths]
    for name, part in parts.items():
        values = source.read(first.get(name, name))
        for rank, file in enumerate(files):
            size = 0 if part.dim < 0 else part.shape[part.dim]
            file.write(name, values if part.dim < 0 else values.narrow(part.dim, rank * size, size))
    for file in files:
        file.close()
