"""Rectangles of tensors: flat ranges of a tensor, and parts of a tensor that tensor parallelism divides.

A checkpoint has each tensor in rectangles of the whole. A ZeRO-1 shard is a flat range of a rank's part, and becomes a
few rectangles. Here a range of a part of 4 x 5 elements becomes three::

    . . . 1 1
    2 2 2 2 2
    2 2 2 2 2
    3 3 . . .
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from nxdpp.ranks import parallel_state
from nxdpp.tensor.padding import Range, own_ranges
from nxdpp.tensor.tensor_attributes import is_tensor_parallel, whole_size


class Block(NamedTuple):
    """A rectangle of a whole tensor: its first element, and its values in memory of the rank."""

    offsets: tuple[int, ...]
    values: torch.Tensor

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the rectangle in the whole."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.values.shape, strict=True))


class PlaceInWhole(NamedTuple):
    """The place of a rank's tensor in the whole.

    Attributes:
        shape: of the whole tensor, without padding.
        local_shape: of the rank's tensor.
        dim: divided dimension, -1 for a whole tensor.
        ranges: the elements along ``dim`` that the rank has. The rest of its tensor is padding.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]

    def blocks(self, values: torch.Tensor, start: int = 0) -> list[Block]:
        """Return ``values`` as rectangles of the whole, which are views of it.

        Args:
            values: a tensor of ``local_shape``, or contiguous elements of the flattened one, of shape ``(n,)``.
            start: index of the first of these elements in the flattened tensor.
        """
        values = values.detach()
        if tuple(values.shape) == self.local_shape:
            return list(self._in_whole((0,) * values.ndim, values))
        flat = values.view(-1)
        found: list[Block] = []
        for first, offsets, sizes in rectangles(self.local_shape, start, start + flat.numel()):
            local = flat[first - start : first - start + prod(sizes)].view(sizes)
            found += self._in_whole(offsets, local)
        return found

    def _in_whole(self, offsets: tuple[int, ...], local: torch.Tensor) -> Iterator[Block]:
        if self.dim < 0:
            yield Block(offsets, local)
            return
        dim = self.dim
        begin, end = offsets[dim], offsets[dim] + local.shape[dim]
        for start, own, length in self.ranges:
            low, high = max(begin, own), min(end, own + length)
            if low < high:
                place = (*offsets[:dim], start + low - own, *offsets[dim + 1 :])
                yield Block(place, local.narrow(dim, low - begin, high - low))


def placement_of(tensor: torch.Tensor) -> PlaceInWhole:
    """Return the place of a parameter or buffer of this rank in the whole, by its attributes of tensor parallelism."""
    shape = tuple(tensor.shape)
    is_divided = is_tensor_parallel(tensor) and (
        hasattr(tensor, "whole_size") or parallel_state.get_tensor_model_parallel_size() > 1
    )
    if not is_divided:
        return PlaceInWhole(shape, shape, -1, ())
    dim = vars(tensor)["partition_dim"] % tensor.ndim
    whole = list(shape)
    whole[dim] = whole_size(tensor)
    return PlaceInWhole(tuple(whole), shape, dim, tuple(own_ranges(tensor)))


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Divide elements ``start`` to ``stop`` of a flattened tensor of ``shape`` into rectangles, in order.

    Gives for each its first element in the flattened tensor, its offsets and its sizes: at most 2 n - 1 for n
    dimensions.
    """
    if start == stop:
        # A tensor without elements is one rectangle. An empty range of any other tensor gives none.
        if prod(shape) == 0:
            yield 0, (0,) * len(shape), shape
        return
    if not shape:
        yield start, (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # The range begins and ends in one row.
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield first * row, (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    base = index * prod(shape[1:])
    for first, offsets, sizes in rectangles(shape[1:], start - base, stop - base):
        yield base + first, (index, *offsets), (1, *sizes)
