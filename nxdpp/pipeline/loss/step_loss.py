"""Loss of one step: what is differentiated of the loss of each microbatch, and what the step returns of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nxdpp.pipeline.loss.item_counts import REMEDY
from nxdpp.pipeline.stages.loss import LossTransform, no_loss
from nxdpp.tracing.models.loss_terms import LossTerm

LABELS_EVERYWHERE = (
    f"Give batches in which each microbatch has a label; or loss_normalization='tokens', the mean over all labels of "
    f"the batch. {REMEDY}"
)


@dataclass(frozen=True)
class StepLoss:
    """Microbatches of a step, and the part of each in its loss.

    Attributes:
        microbatches: the inputs of each.
        scales: factor of each microbatch's loss in the loss of the step, 0 for one without items; ``None`` for the
            mean.
        empty: the labels of microbatches that have none, as far as a module may have a loss without any.
        is_sum: the sum of the losses is differentiated, whatever their ``scales`` are.
        transform: gives the loss that is scaled and differentiated, from the number of a microbatch and its loss.
    """

    microbatches: Sequence[dict[str, Any]]
    scales: Sequence[float] | None = None
    empty: Mapping[int, LossTerm] = field(default_factory=dict)
    is_sum: bool = False
    transform: LossTransform | None = None

    def differentiated(self, microbatch: int, loss: Any) -> torch.Tensor | None:
        """Return the loss whose backward runs, from the ``loss`` of the model; ``None`` for one without items.

        Raises ``ValueError`` for a loss that is no tensor of one element, or that depends on no trained parameter.
        """
        checked = checked_loss(loss)
        if self.transform is not None:
            checked = _checked_transform(self.transform(microbatch, checked))
        if self.is_sum:
            return checked * 1.0
        if self.scales is None:
            return checked / len(self.microbatches)
        # The loss without items is not-a-number.
        return checked * self.scales[microbatch] if self.scales[microbatch] else None

    def scaled(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the losses of the microbatches such that their mean is the loss of the step.

        Raises ``ValueError`` for a loss that is not-a-number for lack of labels.
        """
        for number, term in self.empty.items():
            if number < len(losses) and losses[number].isnan().any():
                raise ValueError(
                    f"{no_label([number], len(losses), f'all values of its {term.targets.name} are -100')}, "
                    f"and the loss of {term.name} is 0 / 0. {LABELS_EVERYWHERE}"
                )
        if self.scales is None:
            return list(losses)
        # Without items a loss is not-a-number.
        return [
            loss * (scale * len(losses)) if scale else torch.zeros_like(loss)
            for loss, scale in zip(losses, self.scales, strict=False)
        ]


def no_label(empty: Sequence[int], count: int, reason: str) -> str:
    """Return words, for a message, about the ``empty`` ones of ``count`` microbatches."""
    return f"microbatch {', '.join(map(str, empty))} of {count} has no label: {reason}"


def _checked_transform(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"the transform of a loss must return a tensor of one element that depends on the loss, not {loss!r:.80}. "
            f"Return loss * 0.0 for a sample that must not count."
        )
    return loss


def checked_loss(loss: Any) -> torch.Tensor:
    """Return ``loss``. Raises ``ValueError`` unless it is a real tensor of one element that can be differentiated."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        raise ValueError(no_loss(loss))
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any parameter that requires a gradient: nothing is left to train. "
            "Set requires_grad of the parameters to train, or evaluate."
        )
    return loss
