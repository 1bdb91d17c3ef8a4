"""Cross-entropy of logits whose vocabulary is divided over the tensor-parallel ranks.

The logits of all ranks are never in one place: ranks exchange three numbers per token. Float32 copies exist for a few
rows at a time, and the softmax is computed again in the backward::

    logits (N, V / ranks)  ─▶ maximum (N)                        all-reduce
                           ─▶ sum of exponentials, label's logit  all-reduce ─▶ loss (N)
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nxdpp.counted import counted
from nxdpp.devices.kinds import device_of
from nxdpp.tensor.collectives import all_reduce, has_values, rank_in, size_of

IGNORED_LABEL = -100

# Rows of logits are converted to float32 up to this size at a time.
_BYTES_AT_ONCE = 1 << 24
_PARTS_WITHOUT_VALUES = 8


def parallel_cross_entropy(
    parallel_logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    vocabulary_size: int | None = None,
) -> torch.Tensor:
    """Return the loss of each label, without a reduction, as in NeuronX Distributed.

    It is ``torch.nn.functional.cross_entropy(..., ignore_index=-100, reduction="none")`` of the gathered logits. The
    loss of a label of -100 is 0. So torch's mean is ``loss.sum() / (labels != -100).sum()``, and ``loss.mean()`` equals
    it where no label is ignored. Logits in float16 and bfloat16 are computed in float32, the dtype of their loss.

    Args:
        parallel_logits: this rank's part ``(..., V / ranks)``; the gradient has this shape and dtype. They must stay
            unchanged until the backward.
        labels: int64 ``(...)``, the same on all ranks, from 0 to ``V - 1`` or -100.
        label_smoothing: the share of the uniform distribution in the target, from 0 to 1, as in torch.
        vocabulary_size: number of columns of all ranks that count. Columns behind them are padding, as in a
            ``ColumnParallelLinear`` with ``pad=True``, and have no gradient. By default all columns count.

    Returns:
        The losses ``(...)``, the same on all ranks.

    Raises:
        ValueError: for a smoothing outside of 0 to 1, for shapes that do not fit, and for a ``vocabulary_size`` that is
            below 1 or above the number of columns.
        IndexError: for a label outside of the vocabulary, on the CPU. CUDA has torch's assertion on the device. On
            XLA, which has none, the loss is not-a-number.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0.0 to 1.0")
    columns = parallel_logits.shape[-1] * size_of(None)
    vocabulary = columns if vocabulary_size is None else vocabulary_size
    if not 1 <= vocabulary <= columns:
        raise ValueError(f"vocabulary_size={vocabulary_size} must be from 1 to {columns}, the columns of all ranks")
    losses: torch.Tensor = _ParallelCrossEntropy.apply(parallel_logits, labels, label_smoothing, vocabulary)  # type: ignore[no-untyped-call]
    return losses


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, vocabulary: int
    ) -> torch.Tensor:
        """Compute the losses, and keep the logits, and for each row the largest one and the logarithm of the sum."""
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: logits "
                f"have one more dimension, this rank's part of the vocabulary"
            )
        rows, ids = _without_padding(logits, vocabulary), labels.reshape(-1)
        index, elsewhere = _own_columns(ids, logits.shape[-1], vocabulary)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        largest = all_reduce(_largest(rows).to(dtype), operation="max")
        # Per row: sum of exponentials, logit of the label, and for the smoothing the sum of the logits.
        sums = largest.new_zeros(2 + (smoothing > 0), len(rows))
        for part in _parts(rows):
            shifted = rows[part].to(dtype) - largest[part, None]
            if smoothing > 0:
                sums[2, part] = shifted.sum(-1)
            sums[1, part] = shifted.gather(-1, index[part, None]).squeeze(-1)
            sums[0, part] = shifted.exp_().sum(-1)
        sums[1].masked_fill_(elsewhere, 0)
        sums = all_reduce(sums)
        normaliser = sums[0].log()
        losses = normaliser - sums[1]
        if smoothing > 0:
            losses = losses.mul_(1 - smoothing).add_(normaliser - sums[2] / vocabulary, alpha=smoothing)
        losses.masked_fill_(ids == IGNORED_LABEL, 0)
        if not device_of(losses.device).refuses_indices:
            losses.masked_fill_(index == logits.shape[-1], math.nan)
        # Not added up: next to a large logit the logarithm would lose its digits, and a gradient is small where it is.
        ctx.save_for_backward(logits, ids, largest, normaliser)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Compute ``(softmax - target) * gradient`` for this rank's columns."""
        logits, ids, largest, normaliser = ctx.saved_tensors
        smoothing, vocabulary = ctx.smoothing, ctx.vocabulary
        rows = _without_padding(logits, vocabulary)
        index, elsewhere = _own_columns(ids, logits.shape[-1], vocabulary)
        scale = gradients[0].reshape(-1).to(normaliser.dtype).masked_fill(ids == IGNORED_LABEL, 0)
        on_label = torch.full_like(scale, smoothing - 1).masked_fill_(elsewhere, 0)
        result = torch.empty_like(logits.reshape(-1, logits.shape[-1]))
        result[:, rows.shape[-1] :] = 0
        for part in _parts(rows):
            shifted = rows[part].to(normaliser.dtype) - largest[part, None]
            softmax = shifted.sub_(normaliser[part, None]).exp_()
            softmax.scatter_add_(-1, index[part, None], on_label[part, None])
            if smoothing > 0:
                softmax.sub_(smoothing / vocabulary)
            # An infinite logit must not make a row of an ignored label not-a-number.
            result[part, : rows.shape[-1]] = softmax.mul_(scale[part, None]).masked_fill_(scale[part, None] == 0, 0)
        return result.view(logits.shape), None, None, None


def _own_columns(ids: torch.Tensor, columns: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label on this rank, 0 for one that is elsewhere, and which ones are elsewhere."""
    outside = ((ids < 0) | (ids >= vocabulary)) & (ids != IGNORED_LABEL)
    if ids.device.type == "cpu" and has_values(ids) and bool(outside.any()):
        raise IndexError(
            f"label {int(ids[outside][0])} is outside of the vocabulary of {vocabulary}, on "
            f"{counted(size_of(None), 'rank')} with {counted(columns, 'column')}; {IGNORED_LABEL} is ignored"
        )
    index = ids - rank_in(None) * columns
    elsewhere = (index < 0) | (index >= columns)
    # For a label outside, torch's own assertion follows on CUDA.
    return index.masked_fill(elsewhere, 0).masked_fill(outside, columns), elsewhere


def _without_padding(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """This rank's logits in two dimensions, of the columns below ``vocabulary``; there may be none."""
    columns = logits.shape[-1]
    count = max(0, min(columns, vocabulary - rank_in(None) * columns))
    return logits.reshape(-1, columns)[:, :count]


def _largest(rows: torch.Tensor) -> torch.Tensor:
    return rows.amax(-1) if rows.shape[-1] else rows.new_full((len(rows),), -math.inf)


def _parts(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that are computed at once."""
    if not rows.shape[-1]:
        return
    # XLA computes the float32 copies without memory for them, in one graph.
    together = len(rows) if device_of(rows.device).is_lazy else _BYTES_AT_ONCE // max(1, rows.shape[-1] * 4)
    # Tensors without values only show sizes, and a few parts are enough for that.
    least = 1 if has_values(rows) else -(-len(rows) // _PARTS_WITHOUT_VALUES)
    count = max(1, together, least)
    for start in range(0, len(rows), count):
        yield slice(start, start + count)
