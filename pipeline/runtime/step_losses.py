"""Losses of the microbatches of a step, as the backward of the last stage takes them."""

from collections.abc import Sequence
from typing import Any

import torch

from nxdpp.pipeline.stages.loss import LossTransform, no_loss


class StepLosses:
    """The part of each microbatch in the loss of a step.

    Args:
        microbatches: number of microbatches of the step.
        scales: the factor of each loss, 0 for a microbatch without items; ``None`` for a mean over microbatches.
        transform: gives the loss that is scaled, from the number of a microbatch and its loss.
    """

    def __init__(self, microbatches: int, scales: Sequence[float] | None, transform: LossTransform | None) -> None:
        self._microbatches = microbatches
        self._scales = scales
        self._transform = transform

    def differentiated(self, microbatch: int, loss: Any) -> torch.Tensor | None:
        """Return the loss whose backward runs, from the ``loss`` of the model; ``None`` for one without items.

        Raises ``ValueError`` for a loss that is no tensor of one element, or that depends on no trained parameter.
        """
        checked = _checked_loss(loss)
        if self._transform is not None:
            checked = _checked_transform(self._transform(microbatch, checked))
        if self._scales is None:
            return checked / self._microbatches
        # The loss without items is not-a-number.
        return checked * self._scales[microbatch] if self._scales[microbatch] else None


def _checked_transform(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"the transform of a loss must return a tensor of one element that depends on the loss, not {loss!r:.80}. "
            f"Return loss * 0.0 for a sample that must not count."
        )
    return loss


def _checked_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        raise ValueError(no_loss(loss))
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any parameter that requires a gradient: nothing is left to train. "
            "Set requires_grad of the parameters to train, or evaluate."
        )
    return loss
