"""Parts of whole tensors in the state dicts of ranks: their places as plain values, cuts and joins.

A rank's tensor has some ranges of the whole along one dimension. Its other elements are padding, which is zero::

    whole     0 1 2 3 4 5 6 7 8 9 10 11                   12 rows, padded to 16
    rank 0    0 1 2 3 4 5 6 7                             ranges [[0, 0, 8]]
    rank 1    8 9 10 11 · · · ·                           ranges [[8, 0, 4]]
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.checkpoint.distributed.rectangles import Block, PlaceInWhole, placement_of
from nxdpp.tensor.padding import Range


def fields_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the place of a parameter or buffer of this rank in the whole, as lists and numbers."""
    whole, shape, dim, ranges = placement_of(tensor)
    size = whole[dim] if dim >= 0 else 0
    return {"shape": list(shape), "dim": dim, "size": size, "ranges": [list(each) for each in ranges]}


def placement_in(fields: Mapping[str, Any]) -> PlaceInWhole:
    """Return the placement of ``fields_of``. Raises ``KeyError`` and ``TypeError`` for anything else."""
    shape, dim = tuple(fields["shape"]), fields["dim"]
    whole = shape if dim < 0 else (*shape[:dim], fields["size"], *shape[dim + 1 :])
    return PlaceInWhole(whole, shape, dim, tuple(Range(*each) for each in fields["ranges"]))


def part_of(whole: torch.Tensor, placement: PlaceInWhole, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Return a rank's part of ``whole``, a new tensor; ``whole`` itself if that is not divided.

    With ``stop`` it is elements ``start`` to ``stop`` of the flattened part, of shape ``(stop - start,)``.
    """
    if placement.dim < 0 and stop is None:
        return whole
    part = whole.new_zeros(placement.local_shape if stop is None else (stop - start,))
    for block in placement.blocks(part, start):
        block.values.copy_(whole[_region(block)])
    return part


def joined(parts: Sequence[tuple[PlaceInWhole, int, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """Return the whole of ``parts``, which may repeat, and the number of elements that they lack.

    A tensor that is not divided is returned itself.

    Args:
        parts: for each a placement, the index of its first element in the flattened tensor of a rank, and its values:
            of the shape of the rank's tensor, or flattened.
    """
    placement, _, first = parts[0]
    if tuple(first.shape) == placement.shape:
        return first, 0
    whole, lacks = first.new_empty(placement.shape), torch.ones(placement.shape, dtype=torch.bool)
    for each, start, values in parts:
        for block in each.blocks(values, start):
            region = _region(block)
            if lacks[region].any():
                whole[region] = block.values
                lacks[region] = False
    return whole, int(lacks.sum())


def _region(block: Block) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(block.offsets, block.values.shape, strict=True))
