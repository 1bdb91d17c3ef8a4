"""Modules of a layer that mix the tokens of a sequence by other means than attention: each rank gives them all tokens.

State spaces, linear attention, convolutions, and attention in a type's own code::

    own tokens (B, T/c, H) ── gather ─▶ (B, T, H) ── the module, as in one process ──▶ (B, T, H) ── cut ─▶ (B, T/c, H)

The ranks repeat each other's work there, and have its activations whole. In the backward the gradient of a rank is that
of its own tokens: those of the inputs are added up where they came from, those of parameters with the other ranks'.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nxdpp.context.cut import cut_sequence, order_of, own_places, places_of
from nxdpp.context.sequence import DIMENSION, sequences
from nxdpp.ground.torch_names import pytree
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import all_gather, reduce_scatter


class WholeSequences(nn.Module):
    """Module that is given all tokens of each sequence and hands on this rank's, put before the methods of its class.

    Its first argument, or ``hidden_states``, is ``(B, tokens, ...)``.
    """

    _probed: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole sequences; collective over the context group."""
        own, length = super().forward, sequences.length
        assert length is not None, "its layer tells it"
        sequences.calls += 1
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
        tokens = hidden.shape[1]

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in sequences.wholes:
                return sequences.wholes.get(id(leaf), leaf)
            dim = 1 if leaf is hidden else DIMENSION.get(leaf.dim())
            return leaf if dim is None or leaf.shape[dim] != tokens else gathered(leaf, dim, length)

        def cut(leaf: Any) -> Any:
            has_tokens = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
            return cut_sequence(leaf, 1) if has_tokens else leaf

        if sequences.is_probed and self._probed is not None:
            return _standing_in(self._probed, hidden)
        given, named = pytree.tree_map(whole, (args, kwargs))
        with sequences.set(are_given=True):
            output = pytree.tree_map(cut, own(*given, **named))
        if not sequences.is_probed:
            return output
        self._probed = output
        return _standing_in(output, hidden)


def _standing_in(output: Any, hidden: torch.Tensor) -> Any:
    """Return an output of the same shapes in which each token has its own input."""

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return hidden.to(leaf.dtype) if leaf.shape == hidden.shape else torch.zeros_like(leaf)

    return pytree.tree_map(value, output)


def gathered(own: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the tokens of all ranks, in order; the gradients of all ranks come back, added up."""
    whole: torch.Tensor = _Gather.apply(own, dim, length)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        ranks = parallel_state.get_context_model_parallel_size()
        ctx.dim, ctx.length = dim, length
        counts = [len(places) for places in places_of(length, ranks)]
        parts = all_gather(_padded(own, dim, max(counts)), dim, _group()).chunk(ranks, dim)
        joined = torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True)], dim)
        return joined.index_select(dim, order_of(length, ranks, own))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks = parallel_state.get_context_model_parallel_size()
        (gradient,), dim, length = gradients, ctx.dim, ctx.length
        places = [own_places(length, ranks, rank, gradient) for rank in range(ranks)]
        most = max(map(len, places))
        parts = [_padded(gradient.index_select(dim, each), dim, most) for each in places]
        own = reduce_scatter(torch.cat(parts, dim), dim, _group())
        count = len(places[parallel_state.get_context_model_parallel_rank()])
        return own.narrow(dim, 0, count).contiguous(), None, None


def _padded(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return ``tensor`` with zeros up to ``count`` tokens: ranks have as many in a collective."""
    shape = list(tensor.shape)
    shape[dim] = count - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _group() -> ProcessGroup:
    return parallel_state.get_context_model_parallel_group()
