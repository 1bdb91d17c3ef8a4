"""Output of a batch from the outputs of its microbatches, value by value.

::

    (k * rows of the microbatch, ...)  in each            concatenated along their rows     logits (B, T, V), (B * T, V)
    ()                                 in each            stacked (microbatches,)           a number of each microbatch
    equal in all                       other tensors      once                              a mask (T, T), positions
    everything else                                       a list, one for each microbatch   a norm (H,) of each, lengths

Values other than tensors are equal in all, or a list.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nxdpp.ground.torch_names import pytree
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension, output_dimension
from nxdpp.tracing.values.nested import flatten, leaves_of


def join_outputs(outputs: Sequence[Any], rows: Sequence[int | None], dimension: BatchDimension | None = None) -> Any:
    """Return the output of a batch, by the rule above, in the structure of the first microbatch.

    Args:
        outputs: of the microbatches. Where their structures differ, they are returned as a list.
        rows: of each microbatch; ``None`` where its inputs do not tell. Tensors of equal shapes behind dimension 0 are
            concatenated then.
        dimension: ``batch_dimension``; by default 0.

    Raises ``ValueError`` as ``output_dimension`` does.
    """
    if len(outputs) == 1:
        return outputs[0]
    columns = [leaves_of(output) for output in outputs]
    structures = [flatten(output)[1] for output in outputs]
    if any(structure != structures[0] for structure in structures) or len({*map(len, columns)}) > 1:
        return list(outputs)
    leaves = [_join(list(parts), rows, dimension) for parts in zip(*columns, strict=True)]
    return pytree.tree_unflatten(leaves, structures[0])


def _join(parts: list[Any], rows: Sequence[int | None], dimension: BatchDimension | None) -> Any:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return parts[0] if all(_are_equal(part, parts[0]) for part in parts) else parts
    if len({part.ndim for part in parts}) == 1:
        if not parts[0].ndim:
            return torch.stack(parts)
        along = output_dimension(parts[0], dimension, rows[0])
        others = {(part.shape[:along], part.shape[along + 1 :]) for part in parts}
        if len(others) == 1 and _are_of_rows([part.size(along) for part in parts], rows):
            return torch.cat(parts, along)
    return parts[0] if all(_are_equal(part, parts[0]) for part in parts) else parts


def _are_of_rows(sizes: list[int], rows: Sequence[int | None]) -> bool:
    """Return whether each microbatch has the same number of values for each of its rows."""
    if None in rows:
        return True
    pairs = [(size, own) for size, own in zip(sizes, rows, strict=True) if own]
    return all(size % own == 0 and size * pairs[0][1] == pairs[0][0] * own for size, own in pairs)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one is other or one == other)
