"""The loss of a language model whose logits are those of this rank's tokens.

Labels are shifted first, and cut afterwards, so the last token of a piece predicts the first one of the next::

    labels   0 1 2 3 4 5 6 7  ─ shift ─▶  1 2 3 4 5 6 7 -  ─ cut ─▶  1 2 7 -  │  3 4 5 6
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from nxdpp.context.cut import cut_sequence
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire
from nxdpp.tensor.collectives import has_values, outside_of_graph
from nxdpp.tensor.models.loss import parallel_causal_lm_loss
from nxdpp.tracing.models.loss_terms import in_place_of


@in_place_of(ForCausalLMLoss)
def loss_of_tokens(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``ForCausalLMLoss`` of transformers for this rank's logits, and labels ``(B, T)`` of the whole sequences.

    Returns the loss of the whole sequences, which all ranks of the context group have alike; collective over it.
    """
    rows = num_items_in_batch, ignore_index, shift_labels
    return _over_ranks(ForCausalLMLoss, logits, labels, vocab_size, *rows, **kwargs)


@in_place_of(ForCausalLMLoss)
def parallel_loss_of_tokens(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``loss_of_tokens`` for logits that are divided over tensor-parallel ranks."""
    rows = num_items_in_batch, ignore_index, shift_labels
    return _over_ranks(parallel_causal_lm_loss, logits, labels, vocab_size, *rows, **kwargs)


LOSSES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    ForCausalLMLoss: loss_of_tokens,
    parallel_causal_lm_loss: parallel_loss_of_tokens,
}
"""For the ``loss_function`` of a model the one over context ranks."""


def _over_ranks(
    own: Callable[..., Any],
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    items: torch.Tensor | int | None,
    ignore_index: int,
    shift_labels: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    if shift_labels is None:
        assert labels is not None
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    share = own(
        logits=logits,
        labels=None,
        vocab_size=vocab_size,
        num_items_in_batch=(shift_labels != ignore_index).sum() if items is None else items,
        ignore_index=ignore_index,
        shift_labels=cut_sequence(shift_labels, 1),
        **kwargs,
    )
    loss: torch.Tensor = _Sum.apply(share)  # type: ignore[no-untyped-call]
    return loss


class _Sum(torch.autograd.Function):
    """Sum of the shares of all ranks. Gradients are averaged over these, so those of a share count once for each."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor) -> torch.Tensor:
        """Return the sum over the context group."""
        if not has_values(share):
            return share.clone()
        group = parallel_state.get_context_model_parallel_group()
        wire = on_wire(outside_of_graph(share.clone()), group)
        with Wait("loss of context ranks", group):
            dist.all_reduce(wire, group=group)
        board.moved()
        return outside_of_graph(from_wire(wire, share.device))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's share."""
        return gradients[0] * parallel_state.get_context_model_parallel_size()
