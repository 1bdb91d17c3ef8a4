"""The dimension of inputs and outputs that has the rows of a batch: 0, unless ``batch_dimension`` names another.

::

    batch_dimension=1         x (T, B, H), target (T, B)  along 1      lengths (B,)   along its only one
    batch_dimension={"x": 1}  x (T, B, H)                 along 1      labels (B,)    along 0

Without it, inputs that may have their rows along either are a question in the first step: ``sequence_first``.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

BatchDimension = int | Mapping[str, int]
"""A dimension of all inputs, or of each by its name. ``"return"`` is the output."""

OUTPUT = "return"


def check_batch_dimension(given: Any) -> None:
    """Raise ``ValueError`` unless ``given`` has dimensions."""
    values = list(given.values()) if isinstance(given, Mapping) else [0 if given is None else given]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"batch_dimension={given!r} must be a dimension of all inputs, such as 1 for (T, B), or a dict of "
                f'dimensions by the names of inputs, such as {{"x": 1}}; the others have their rows along 0.'
            )


def named_inputs(given: BatchDimension | None) -> list[str]:
    """Return the names of inputs of ``forward`` or the loss in ``given``."""
    return [name.partition("[")[0] for name in given if name != OUTPUT] if isinstance(given, Mapping) else []


def dimensions_of(inputs: Mapping[str, Any], given: BatchDimension | None) -> dict[str, int]:
    """Return the dimension of the rows of each opened input; of a tensor with fewer dimensions the last one.

    Raises ``ValueError`` for a dimension by name that the input does not have.
    """
    if not given:
        return dict.fromkeys(inputs, 0)
    found = {}
    for name, value in inputs.items():
        own = given.get(name, 0) if isinstance(given, Mapping) else given
        last = max(0, value.ndim - 1) if isinstance(value, torch.Tensor) else 0
        if own > last and isinstance(given, Mapping) and isinstance(value, torch.Tensor):
            raise ValueError(f"batch_dimension[{name!r}] is {own}, and {name} has the shape {tuple(value.shape)}.")
        found[name] = min(own, last)
    return found


def rows_of(inputs: Mapping[str, Any], given: BatchDimension | None, shared: Collection[str] | None) -> int | None:
    """Return the number of rows of the opened ``inputs``, but for ``shared`` ones; ``None`` where these disagree."""
    along = dimensions_of(inputs, given)
    own = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.ndim and n not in (shared or ())}
    sizes = {tensor.size(along[name]) for name, tensor in own.items()}
    rows = (sizes - {1}) or sizes
    return rows.pop() if len(rows) == 1 else None


def shapes_of_rows(
    inputs: Mapping[str, Any], given: BatchDimension | None, shared: Collection[str] | None
) -> list[dict[str, tuple[torch.Size, torch.dtype]]]:
    """Return the shapes and dtypes of the opened ``inputs``, and the ones with other rows; none where rows disagree."""
    rows = rows_of(inputs, given, shared)
    if rows is None:
        return []
    along = dimensions_of(inputs, given)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    more = {}
    for name, value in tensors.items():
        shape = list(value.shape)
        if shape and shape[along[name]] == rows and name not in (shared or ()):
            # No rule of a size from b rows, such as b // 2, is likely to give one size for both.
            shape[along[name]] = 2 * rows + 1
        more[name] = torch.Size(shape), value.dtype
    return [{name: (value.shape, value.dtype) for name, value in tensors.items()}, more]


def value_counts(
    inputs: Mapping[str, Any], given: BatchDimension | None, shared: Collection[str] | None
) -> dict[tuple[str, int], int]:
    """Return how many values an output may have for the rows of opened ``inputs``, and for their positions.

    Key ``(name, 1)`` has the rows of an input, ``(name, d)`` the elements of its first d dimensions: B * T for (B, T).
    """
    along, rows = dimensions_of(inputs, given), rows_of(inputs, given, shared)
    counts: dict[tuple[str, int], int] = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or not value.ndim or name in (shared or ()):
            continue
        own = value.size(along[name])
        if rows in (None, own):
            depths = range(1, 2 if along[name] else value.ndim + 1)
            counts |= {(name, depth): own if depth == 1 else value.shape[:depth].numel() for depth in depths}
    return counts


def rows_first(inputs: Mapping[str, Any], dimensions: Mapping[str, int]) -> Mapping[str, Any]:
    """Return views of the opened inputs with their rows along dimension 0."""
    if not any(dimensions.values()):
        return inputs
    return {name: value.movedim(dimensions[name], 0) if dimensions[name] else value for name, value in inputs.items()}


def output_dimension(part: torch.Tensor, given: BatchDimension | None, rows: int | None) -> int:
    """Return the dimension along which outputs like ``part``, of a microbatch with ``rows`` rows, are joined.

    Raises ``ValueError`` where the sizes do not tell it and ``given`` does not name it.
    """
    if not given or part.ndim < 2:
        return 0
    named = given.get(OUTPUT) if isinstance(given, Mapping) else None
    if named is not None:
        return min(named, part.ndim - 1)
    known = {0, *given.values()} if isinstance(given, Mapping) else {0, given}
    fitting = [each for each in sorted(known) if each < part.ndim and part.size(each) == rows]
    if len(fitting) == 1:
        return fitting[0]
    example = dict.fromkeys([*named_inputs(given), OUTPUT], 1) if isinstance(given, Mapping) else {"x": 1, OUTPUT: 1}
    raise ValueError(
        f"an output of a microbatch has the shape {tuple(part.shape)}, and its rows, {rows}, may be along "
        f"{' or '.join(map(str, fitting)) or 'none'} of the dimensions {sorted(known)}. Name the one along which "
        f"outputs are joined, {OUTPUT!r}: batch_dimension={example} (0 for outputs with their rows first)."
    )
