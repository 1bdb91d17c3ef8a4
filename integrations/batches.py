"""Microbatches of an optimizer step: its batches as they are, or each one split by rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def split_rows(batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """Return ``batch`` in at most ``parts`` parts of its rows: ``(b, ...)`` of each tensor ``(B, ...)``.

    Fewer rows than parts give a part each. Values that are no tensors go whole to each part.

    Raises:
        ValueError: for tensors of other first dimensions.
    """
    if parts == 1:
        return [dict(batch)]
    sizes = {name: value.size(0) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"num_microbatches splits each batch by rows, and its tensors have other first dimensions: {sizes}. Use "
            f"num_microbatches=gradient_accumulation_steps, which splits no batch."
        )
    rows = min(parts, next(iter(sizes.values())))
    columns = {name: value.tensor_split(rows) if name in sizes else [value] * rows for name, value in batch.items()}
    return [{name: column[part] for name, column in columns.items()} for part in range(rows)]


def joined(losses: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the loss of each batch, the sum of those of its parts, of which ``counts`` has the numbers."""
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [torch.stack(list(losses[end - count : end])).sum() for end, count in zip(ends, counts, strict=True)]
