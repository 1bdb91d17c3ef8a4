"""Files of NeuronX Distributed's ranks, as source and as destination of a conversion.

::

    path/tp_rank_01_pp_rank_00/checkpoint.pt       of parallel_layers.save; these are written
    path/dp_rank_00_tp_rank_01_pp_rank_00.pt       of its trainer, in path or path/model

Files do not tell how a tensor is divided. That follows from the whole shapes of the configuration's model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nxdpp.checkpoint.commands.rank_parts import RankPart, Whole, check_not_ambiguous, parts_of
from nxdpp.checkpoint.commands.source import Source, check_free, meta_model
from nxdpp.checkpoint.files.layout import StoredLayout
from nxdpp.checkpoint.files.rank_file import FILE, KEY, RankFile, make_file, rank_files
from nxdpp.checkpoint.huggingface.read_directory import texts_in
from nxdpp.tensor.rank_files import rank_name

Files = Sequence[RankFile]
"""The files of the tensor ranks of one pipeline rank."""


def rank_source(path: Path, config: Path | None, blocks: bool = False) -> Source:
    """Return the model in the files of ranks in ``path``.

    ``blocks`` divides fused weights as ``tensor_parallelize`` does; without it they are refused.

    Raises ``ValueError`` where the tensors do not fit the configuration, where they could make several wholes, and for
    copies of a tensor that differ.
    """
    files = rank_files(path)
    model = meta_model(texts_in(path), config, path)
    tensor, pipeline = (max(place[at] for place in files) + 1 for at in (0, 1))
    parts = parts_of(model, tensor, 1, path)[0]
    check_not_ambiguous(parts, tensor, blocks)
    opened = {place: RankFile(file, KEY) for place, file in files.items()}
    held: dict[str, list[Files]] = {}
    for stage in range(pipeline):
        for name in opened[0, stage].layouts:
            held.setdefault(name, []).append([opened[each, stage] for each in range(tensor)])
    wholes = {
        name: Whole(name, copies[0], tuple(model.tensors.tensors[first].shape), parts[name].blocks)
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


def write_ranks(source: Source, destination: Path, tensor: int, pipeline: int, blocks: bool = False) -> None:
    """Write a file for each of ``tensor`` x ``pipeline`` ranks, which ``parallel_layers.load`` reads.

    ``blocks`` divides fused weights as ``tensor_parallelize`` does; without it they are refused.

    Raises ``ValueError`` where ``destination`` has files of ranks or is no directory, for a model that cannot be
    divided, and for parts that other programs divide differently.
    """
    check_free(destination)
    if rank_files(destination):
        raise ValueError(f"{destination} has files of ranks already: give another directory.")
    parts = parts_of(source.model, tensor, pipeline, destination)
    for of_stage in parts:
        check_not_ambiguous(of_stage, tensor, blocks)
    made: list[Path] = []
    try:
        for stage, of_stage in enumerate(parts):
            folders = [destination / rank_name(rank, stage) for rank in range(tensor)]
            made += [folder / f".{FILE}" for folder in folders]
            _write_stage(source, of_stage, made[-tensor:])
    except BaseException:
        for file in made:
            file.unlink(missing_ok=True)
        raise
    for file in made:
        file.rename(file.with_name(FILE))


def _write_stage(source: Source, parts: Mapping[str, RankPart], paths: Sequence[Path]) -> None:
    """Write the files of the tensor ranks of one pipeline rank; each tensor is read once."""
    first = source.model.tensors.ties
    layouts = {
        name: StoredLayout(part.shape, source.layouts[first.get(name, name)].dtype) for name, part in parts.items()
    }
    files = [make_file(path, layouts, KEY) for path in paths]
    for name, part in parts.items():
        values = source.read(first.get(name, name))
        for rank, file in enumerate(files):
            file.write(name, values if part.dim < 0 else part.of(values, rank))
    for file in files:
        file.close()
