"""The slice of a tensor that a tensor-parallel rank holds."""

import torch


def local_slice(full: torch.Tensor, dim: int, rank: int, size: int, stride: int = 1) -> torch.Tensor:
    """Part of ``full`` that ``rank`` of ``size`` holds: a view for ``stride`` 1, else a copy.

    With ``stride`` blocks along ``dim``, such as the three of a fused query, key and value, the rank holds its part of
    each block::

        stride 3, size 2:   q0 q1 | k0 k1 | v0 v1     rank 0: q0 k0 v0     rank 1: q1 k1 v1
    """
    chunks = torch.split(full, full.shape[dim] // (size * stride), dim)[rank::size]
    return chunks[0] if stride == 1 else torch.cat(chunks, dim)
