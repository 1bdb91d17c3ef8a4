"""Loss of a causal language model whose head is divided over the vocabulary."""

import inspect
import re
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from nxdpp.tensor.loss_functions import IGNORED_LABEL, parallel_cross_entropy
from nxdpp.tensor.models.modules import ColumnLinear
from nxdpp.tracing.models.loss_terms import in_place_of


def divide_loss(model: PreTrainedModel) -> bool:
    """Make the head of ``model`` return this rank's logits, and its loss take them; return whether it is possible.

    The head stays gathered in a model whose loss is not ``ForCausalLMLoss``, or whose ``forward`` takes parts of the
    logits.
    """
    head = model.get_output_embeddings()
    if not (isinstance(head, ColumnLinear) and head.gather_output and head.stride == 1):
        return False
    if model.loss_function is not ForCausalLMLoss or not _hands_on_logits(type(model).forward):
        return False
    head.gather_output = False
    model.loss_function = parallel_causal_lm_loss
    return True


@in_place_of(ForCausalLMLoss)
def parallel_causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``ForCausalLMLoss`` of transformers for this rank's logits ``(B, T, V / ranks)`` and labels ``(B, T)``."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    targets = shift_labels.reshape(-1)
    if ignore_index != IGNORED_LABEL:
        targets = targets.masked_fill(targets == ignore_index, IGNORED_LABEL)
    losses = parallel_cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)
    count = (targets != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / count


def calls_loss_function(forward: Any) -> bool:
    """Return whether ``forward`` computes its loss by ``self.loss_function``."""
    return "self.loss_function(" in _after_head(forward)


def _hands_on_logits(forward: Any) -> bool:
    """Return whether ``forward`` computes its loss by ``self.loss_function`` from logits that it does not select."""
    selects = r"logits\s*\[|CrossEntropy|softmax|logits\.(max|min|sum|mean|topk)"
    return calls_loss_function(forward) and not re.search(selects, _after_head(forward))


def _after_head(forward: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(forward)).rpartition("lm_head(")[2]
    except (OSError, TypeError):
        return ""
