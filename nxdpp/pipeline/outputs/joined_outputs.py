"""Output of a batch from the outputs of its microbatches, value by value, by the first line that holds.

::

    computed of no value of an input, equal in all     once                               a mask, a temperature
    () in each                                         stacked (microbatches,)            a number of each microbatch
    a value for each row, (B, ...)                     concatenated along the rows        logits (B, T, V)
    equal in all                                       once                               positions, a mask (T, T)
    a value for each position of an input, (B * T, ..) concatenated along dimension 0     logits (B * T, V)
    everything else                                    a list, one for each microbatch    a norm (H,) of each, lengths

Values other than tensors are equal in all, or a list. What is computed of sizes of inputs is made of no value of them,
unless its own size follows the rows: ``eye(x.shape[1])``, but not ``ones(x.shape[0])``.

Sizes tell rows and positions, so that other tensors of just these sizes, a norm (H,) of microbatches with H rows, are
taken for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.ground.torch_names import pytree
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension, output_dimension
from nxdpp.tracing.values.nested import flatten, leaves_of

Counts = Mapping[tuple[str, int], int]


def join_outputs(
    outputs: Sequence[Any],
    counts: Sequence[Counts],
    dimension: BatchDimension | None = None,
    is_of_no_input: Sequence[bool] = (),
) -> Any:
    """Return the output of a batch, by the rule above, in the structure of the first microbatch.

    Args:
        outputs: of the microbatches. Where their structures differ, they are returned as a list; dicts are joined by
            names, and a value that some do not have is a list, with ``None`` for those.
        counts: ``value_counts`` of the inputs of each microbatch.
        dimension: ``batch_dimension``; by default 0.
        is_of_no_input: for each value whether it is computed of no value of an input; empty if unknown.

    Raises ``ValueError`` as ``output_dimension`` does.
    """
    if len(outputs) == 1:
        return outputs[0]
    columns = [leaves_of(output) for output in outputs]
    structures = [flatten(output)[1] for output in outputs]
    if any(structure != structures[0] for structure in structures) or len({*map(len, columns)}) > 1:
        return _join_names(outputs, counts, dimension)
    own = is_of_no_input if len(is_of_no_input) == len(columns[0]) else [False] * len(columns[0])
    parts = zip(*columns, strict=True)
    leaves = [_join(list(each), counts, dimension, is_free) for each, is_free in zip(parts, own, strict=True)]
    return pytree.tree_unflatten(leaves, structures[0])


def _join_names(outputs: Sequence[Any], counts: Sequence[Counts], dimension: BatchDimension | None) -> Any:
    """Join each value of dicts of one type, such as the outputs of rows with images and of rows without."""
    kind = type(outputs[0])
    if not all(type(each) is kind and isinstance(each, dict) and {*map(type, each)} <= {str} for each in outputs):
        return list(outputs)
    values = {name: [output.get(name) for output in outputs] for output in outputs for name in output}
    in_all = {name for name in values if all(name in output for output in outputs)}
    return kind(**{n: join_outputs(v, counts, dimension) if n in in_all else v for n, v in values.items()})


def _join(parts: list[Any], counts: Sequence[Counts], dimension: BatchDimension | None, is_of_no_input: bool) -> Any:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return parts[0] if _are_all_equal(parts) else parts
    if is_of_no_input and _are_all_equal(parts):
        return parts[0]
    if len({part.ndim for part in parts}) > 1:
        return parts
    if not parts[0].ndim:
        return torch.stack(parts)
    along, depths = _fitting(parts, counts, dimension)
    if 1 in depths:
        return torch.cat(parts, along)
    if _are_all_equal(parts):
        return parts[0]
    return torch.cat(parts, along) if depths else parts


def _fitting(
    parts: list[torch.Tensor], counts: Sequence[Counts], dimension: BatchDimension | None
) -> tuple[int, set[int]]:
    """Return the dimension along which tensors may be joined, and the depths of ``counts`` that have its sizes.

    Flattened positions are joined only where rows are first.
    """
    sizes = {count for (_, depth), count in counts[0].items() if depth == 1}
    if dimension and parts[0].ndim > 1 and not sizes & {*parts[0].shape}:
        return 0, set()
    along = output_dimension(parts[0], dimension, sizes.pop() if len(sizes) == 1 else None)
    if len({(part.shape[:along], part.shape[along + 1 :]) for part in parts}) > 1:
        return along, set()
    own = [part.size(along) for part in parts]
    depths = {key[1] for key in counts[0] if [each.get(key) for each in counts] == own}
    return along, depths & {1} if along else depths


def _are_all_equal(parts: list[Any]) -> bool:
    return all(_are_equal(part, parts[0]) for part in parts[1:])


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one is other or one == other)
