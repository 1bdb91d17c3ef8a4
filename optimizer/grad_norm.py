"""Clipping of gradients of which each replica has a part, by the norm of the whole model."""

import math
from collections.abc import Iterable

import torch

from nxdpp.optimizer.sharded_bucket import Piece
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.gradient_norm import counted_share, total_norm


def clip_pieces(pieces: Iterable[Piece], max_norm: float) -> torch.Tensor:
    """Scale the gradients of the pieces of all ranks so that their norm is ``max_norm`` at most; return it before.

    Collective over all ranks. Infinity only measures. Each element counts once: pieces of replicas do not overlap.
    Returns a float32 tensor of shape ().
    """
    given = [(piece.tensor.grad, counted_share(piece.member.parameter)) for piece in pieces]
    gradients = [gradient for gradient, _ in given if gradient is not None]
    shares = [share for gradient, share in given if gradient is not None]
    groups = [parallel_state.get_data_parallel_group(), parallel_state.get_model_parallel_group()]
    norm = total_norm(gradients, shares, 2.0, groups)
    if max_norm == math.inf:
        return norm
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm
