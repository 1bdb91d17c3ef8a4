"""Place of a rank's tensor in the whole one, as plain values that a file can hold.

The tensor has some ranges of the whole along one dimension. Its other elements are padding, which is zero::

    whole     0 1 2 3 4 5 6 7 8 9 10 11                   12 rows, padded to 16
    rank 0    0 1 2 3 4 5 6 7                             ranges ((0, 0, 8),)
    rank 1    8 9 10 11 · · · ·                           ranges ((8, 0, 4),)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import torch

from nxdpp import parallel_state


class Range(NamedTuple):
    """``length`` elements from ``start`` on in the whole are those from ``own`` on in the part."""

    start: int
    own: int
    length: int


@dataclass(frozen=True)
class Placement:
    """Place of a tensor of a rank in the whole tensor.

    Attributes:
        shape: of the rank's tensor.
        dim: the divided dimension, -1 for a whole tensor.
        size: of the whole along ``dim``, without padding; 0 for a whole tensor.
        ranges: the elements along ``dim`` that the rank has.
    """

    shape: tuple[int, ...]
    dim: int = -1
    size: int = 0
    ranges: tuple[Range, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return the placement of a parameter or buffer of this rank, by its attributes of tensor parallelism."""
        shape = tuple(tensor.shape)
        ranks = parallel_state.get_tensor_model_parallel_size() if parallel_state.model_parallel_is_initialized() else 1
        if not getattr(tensor, "tensor_model_parallel", False) or ranks == 1:
            return cls(shape)
        attributes = vars(tensor)
        dim, parts = attributes["partition_dim"] % tensor.dim(), attributes["num_partitions"]
        blocks = attributes.get("partition_stride", 1)
        size = attributes.get("whole_size", shape[dim] * parts)
        index = parallel_state.get_tensor_model_parallel_rank() // (ranks // parts)
        block, chunk = size // blocks, shape[dim] // blocks
        start = min(index * chunk, block)
        length = min(chunk, block - start)
        return cls(shape, dim, size, tuple(Range(i * block + start, i * chunk, length) for i in range(blocks)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the placement of ``to_dict``. Raises ``KeyError`` and ``TypeError`` for another content."""
        ranges = tuple(Range(*each) for each in fields["ranges"])
        return cls(tuple(fields["shape"]), fields["dim"], fields["size"], ranges)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as lists and numbers."""
        return {**asdict(self), "shape": list(self.shape), "ranges": [list(each) for each in self.ranges]}

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, without padding."""
        if self.dim < 0:
            return self.shape
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``whole``, a new tensor; ``whole`` itself where it is not divided."""
        if self.dim < 0:
            return whole
        part = whole.new_zeros(self.shape)
        for start, own, length in self.ranges:
            part.narrow(self.dim, own, length).copy_(whole.narrow(self.dim, start, length))
        return part


def join(parts: Sequence[tuple[Placement, torch.Tensor]]) -> torch.Tensor | None:
    """Return the whole of ``parts``, which may repeat; ``None`` where they leave elements out.

    A tensor that is not divided is returned itself.
    """
    placement, first = parts[0]
    if placement.dim < 0:
        return first
    whole = first.new_empty(placement.whole_shape)
    missing = torch.ones(placement.size, dtype=torch.bool)
    for each, part in parts:
        for start, own, length in each.ranges:
            if missing[start : start + length].any():
                whole.narrow(each.dim, start, length).copy_(part.narrow(each.dim, own, length))
                missing[start : start + length] = False
    return None if missing.any() else whole
