"""A whole tensor in the files of tensor ranks, which do not tell how it is divided."""

from collections.abc import Sequence

import torch

from nxdpp.checkpoint.commands.rank_parts import Part
from nxdpp.checkpoint.files.layout import Layout, layout_of
from nxdpp.checkpoint.files.rank_file import RankFile


class Whole:
    """A tensor of which each of ``files`` has a part or a copy, by its shape.

    Args:
        name: of the tensor in the files.
        files: of the tensor ranks in order.
        expected: whole shape by the configuration.
        blocks: number of blocks along the divided dimension that are divided each.

    Raises ``ValueError`` for shapes that do not make this whole, or could make it in several ways.
    """

    def __init__(self, name: str, files: Sequence[RankFile], expected: tuple[int, ...], blocks: int) -> None:
        self._name = name
        self._files = files
        kinds = {file.layouts.get(name) for file in files}
        found = kinds.pop()
        if kinds or found is None:
            raise ValueError(f"{name} is not of one shape and dtype on all tensor ranks: give the files of one save.")
        dim = _divided_dim(name, found.shape, expected, len(files))
        self._part = Part(found.shape, dim, blocks, len(files))
        self.layout = Layout(expected, found.dtype)

    def read(self) -> torch.Tensor:
        """Return the values."""
        values = torch.empty(self.layout.shape, dtype=self.layout.dtype)
        if not self._is_divided:
            self._files[0].read(self._name, values)
            return values
        for rank, file in enumerate(self._files):
            if self._part.blocks == 1:
                file.read(self._name, self._part.of(values, rank))
                continue
            part = torch.empty(self._part.shape, dtype=self.layout.dtype)
            file.read(self._name, part)
            self._part.put(values, rank, part)
        return values

    def check_equal(self, name: str, files: Sequence[RankFile]) -> None:
        """Raise ``ValueError`` unless ``files`` have the same values under ``name``, and all copies are equal."""
        if self._is_divided and name == self._name and files is self._files:
            return
        values = self.read()
        for rank, file in enumerate(files):
            own = self._part.of(values, rank) if self._is_divided else values
            if file.layouts.get(name) != layout_of(own) or not file.equals(name, own):
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
        f"{name} is of shape {list(shape)} on each of {ranks} tensor ranks, and of {list(expected)} by the "
        f"configuration: copies, padding and other divisions are not known from files."
    )
