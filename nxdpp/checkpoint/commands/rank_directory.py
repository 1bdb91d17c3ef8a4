"""Files of NeuronX Distributed's ranks, as source and as destination of a conversion.

::

    path/tp_rank_01_pp_rank_00/checkpoint.pt       of parallel_layers.save; these are written
    path/dp_rank_00_tp_rank_01_pp_rank_00.pt       of its trainer, in path or path/model

Files do not tell how a tensor is divided. That follows from the whole shapes of the configuration's model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nxdpp.checkpoint.commands.source import MetaModel, Source, check_free, meta_model
from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole
from nxdpp.checkpoint.files.pieces import StoredLayout, layout_of
from nxdpp.checkpoint.files.rank_file import FILE, KEY, RankFile, make_file, rank_files
from nxdpp.checkpoint.huggingface.model_tensors import tensors_of
from nxdpp.checkpoint.huggingface.read_directory import texts_in
from nxdpp.counted import counted
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.parallelize import tensor_parallelize
from nxdpp.tensor.padding import ranges
from nxdpp.tensor.rank_files import rank_name
from nxdpp.tensor.tensor_attributes import is_tensor_parallel

Files = Sequence[RankFile]
"""The files of the tensor ranks of one pipeline rank."""


@dataclass(frozen=True)
class RankPart:
    """Shape of a rank's part of a tensor: each of ``blocks`` divided along ``dim`` (-1: whole) into ``count``."""

    shape: tuple[int, ...]
    dim: int = -1
    blocks: int = 1
    count: int = 1

    def place(self, rank: int) -> PlaceInWhole:
        """The place of a rank's part in the whole."""
        if self.dim < 0:
            return PlaceInWhole(self.shape, self.shape, -1, ())
        size = self.shape[self.dim]
        whole = (*self.shape[: self.dim], size * self.count, *self.shape[self.dim + 1 :])
        return PlaceInWhole(whole, self.shape, self.dim, tuple(ranges(size * self.count, size, self.blocks, rank)))


def parts_of(model: MetaModel, tensor: int, pipeline: int, origin: Path) -> list[dict[str, RankPart]]:
    """Return the parts of each of ``pipeline`` ranks, equal on all its ``tensor`` ranks.

    The model is divided as by ``tensor_parallelize`` and by ``NxDPPModel`` with its even cuts. Raises ``ValueError``
    for a model that these refuse.
    """
    if tensor == pipeline == 1:
        return [{name: RankPart(tuple(value.shape)) for name, value in tensors_of(model.module).items()}]
    found = []
    for rank in range(pipeline):
        parallel_state.initialize_debug(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=pipeline
        )
        try:
            module = meta_model(model.texts, None, origin).module
            if tensor > 1:
                tensor_parallelize(module)
            local = module if pipeline == 1 else NxDPPModel(module).local_module
            found.append({name: _part(value) for name, value in tensors_of(local).items()})
        finally:
            parallel_state.destroy_model_parallel()
    return found


def check_not_ambiguous(parts: Mapping[str, RankPart], tensor: int, blocks: bool) -> None:
    """Raise ``ValueError`` for parts in an unknown order; with ``blocks`` the order of blocks is known."""
    for name, part in parts.items():
        if part.dim < 0:
            continue
        if part.blocks > 1 and not blocks:
            raise ValueError(
                f"{name} is divided in {part.blocks} blocks, and files of ranks do not tell them: other programs "
                f"divide it in other ways. If the ranks divide it as tensor_parallelize does, give --blocks. Else "
                f"convert with one tensor rank, or to another format."
            )
        if part.count != tensor:
            raise ValueError(
                f"{name} has {counted(part.count, 'part')} on {counted(tensor, 'rank')}, and files of ranks do not "
                f"tell which have copies. Convert with {counted(part.count, 'tensor rank')}, or to another format."
            )


def _part(tensor: torch.Tensor) -> RankPart:
    shape = tuple(tensor.shape)
    if not is_tensor_parallel(tensor):
        return RankPart(shape)
    attributes = vars(tensor)
    return RankPart(
        shape,
        attributes["partition_dim"] % tensor.ndim,
        attributes.get("partition_stride", 1),
        attributes["num_partitions"],
    )


class Whole:
    """A tensor of which each of ``files``, of the tensor ranks in order, has a part or a copy, by its shape.

    ``expected`` is the whole shape by the configuration. Each of ``blocks`` blocks along the divided dimension is
    divided. Raises ``ValueError`` for shapes that do not make this whole, or could make it in several ways.
    """

    def __init__(self, name: str, files: Sequence[RankFile], expected: tuple[int, ...], blocks: int) -> None:
        self._name = name
        self._files = files
        kinds = {file.layouts.get(name) for file in files}
        found = kinds.pop()
        if kinds or found is None:
            raise ValueError(f"{name} is not of one shape and dtype on all tensor ranks: give the files of one save.")
        dim = _divided_dim(name, found.shape, expected, len(files))
        self._part = RankPart(found.shape, dim, blocks, len(files))
        self.layout = StoredLayout(expected, found.dtype)

    def read(self) -> torch.Tensor:
        """Return the values."""
        values = torch.empty(self.layout.shape, dtype=self.layout.dtype, device="cpu")
        for rank, file in enumerate(self._files if self._is_divided else self._files[:1]):
            for block in self._part.place(rank).blocks(file.read(self._name)):
                values[block.region] = block.values
        return values

    def check_equal(self, name: str, files: Sequence[RankFile]) -> None:
        """Raise ``ValueError`` unless ``files`` have the same values under ``name``, and all copies are equal."""
        if self._is_divided and name == self._name and files is self._files:
            return
        values = self.read()
        for rank, file in enumerate(files):
            own = self._part.place(rank).part_of(values)
            if file.layouts.get(name) != layout_of(own) or not torch.equal(file.read(name), own):
                raise ValueError(
                    f"{name} on tensor rank {rank} differs from {self._name} on rank 0 or on another stage, and the "
                    f"configuration's model has one tensor there: give the configuration of the model that was saved."
                )

    @property
    def _is_divided(self) -> bool:
        return self._part.dim >= 0


def _divided_dim(name: str, shape: tuple[int, ...], expected: tuple[int, ...], ranks: int) -> int:
    """The dimension along which a tensor is divided; -1 where each rank has the whole."""
    if shape == expected:
        return -1
    dims = [dim for dim, size in enumerate(shape) if len(shape) == len(expected) and size != expected[dim]]
    if len(dims) == 1 and shape[dims[0]] * ranks == expected[dims[0]]:
        return dims[0]
    raise ValueError(
        f"{name} is of shape {list(shape)} on each of {counted(ranks, 'tensor rank')}, and of {list(expected)} by the "
        f"configuration: copies, padding and other divisions are not known from files."
    )


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
            file.write(name, part.place(rank).part_of(values))
    for file in files:
        file.flush()
